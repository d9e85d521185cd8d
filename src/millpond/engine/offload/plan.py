"""Plan of a sweep: placement of weights and KV, schedule, predicted speed, and its file and sentences."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from millpond.cache.atomic_files import publish, write_part
from millpond.errors import DataError, OptionError, unknown
from millpond.option_files import read_file
from millpond.typed_json import Number, as_type

_Figure = Annotated[float, Number(at_least=0)]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted figures of a plan for one workload.

    Attributes:
        seconds: Time from the first prompt token to the last new token of one block.
        prefill_s: Part of it in which prompts are read.
        decode_s: Part of it after that.
        tokens_per_s: New tokens of the block over `seconds`.
        prefill_tokens_per_s: Prompt tokens over `prefill_s`.
        decode_tokens_per_s: New tokens over `decode_s`.
        prefill_bound: Slowest part of a sweep that reads prompts: "disk reads", "disk writes", "link", "compute" or
            "attention".
        decode_bound: Slowest part of a decoding sweep.
        bytes: Bytes by tier, then by purpose, of tiers that can be addressed at the peak.
        what_if: Tokens per second of the best plan when one thing changes, by a name of the change.
    """

    seconds: _Figure
    prefill_s: _Figure
    decode_s: _Figure
    tokens_per_s: _Figure
    prefill_tokens_per_s: _Figure
    decode_tokens_per_s: _Figure
    prefill_bound: str
    decode_bound: str
    bytes: Mapping[str, Mapping[str, Annotated[int, Number(at_least=0)]]] = field(default_factory=dict)
    what_if: Mapping[str, _Figure] = field(default_factory=dict)

    def total(self, tier: str) -> int:
        """Return the bytes of all purposes in a tier."""
        return sum(self.bytes.get(tier, {}).values())


#: Tiers, from the nearest to the farthest from where products are computed.
DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")
#: Order in which micro-batches and layers run: see `Plan`.
Schedule = Literal["row", "zigzag", "diagonal"]
#: Tier of embeddings and head; "host" is the device's memory if there is one.
Ends = Literal["host", "disk"]
#: Slots for layers that are streamed: one in use, two being read.
SLOTS = 3
#: Largest error of the sum of shares.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a model that need not fit in memory.

    Attributes:
        weights: Shares of the tiers "device", "host" and "disk"; they sum to 1. These are shares of the layers, of all
            sequences alike: the last norm always stays in memory, and so do positions and scores of entries.
        kv: Shares of the same tiers; they sum to 1. Layers whose KV is on the host or a disk attend on the host. "host"
            alone is the device's memory if there is one; {"device": 0, "host": 1} is the host's.
        values: Share of the entries whose values a decoding step reads in layers that attend on the host of a device:
            those with the most attention, which is computed from all keys. 1 reads all.
        ends: Tier of embeddings and head. On the "disk" the head is read in tiles after the layers of each sweep, and
            of embeddings the rows of the sweep's tokens.
        schedule: "row" runs one micro-batch in each sweep over the layers; "zigzag" runs all micro-batches of a block
            in one sweep, so that they share one reading of the weights, and begins the next block when it has ended;
            "diagonal" as "zigzag", but sequences begin spread evenly over the length of an answer while many wait, and
            memory holds their mean cache rather than the largest: see `EngineConfig.spread_ages`.
        micro_batch: Sequences that pass a layer at a time; the KV on a disk of these is read together.
        block: Sequences that share a sweep; None: all that fit.
        prompt_rows: Most prompt tokens in one sweep.
        slots: Layers in memory at a time of those that are on disk.
        model: Fingerprint of the model that it was made for; any model if it is empty.
        prediction: Figures that were predicted when it was made; None for a plan written by hand.

    Raises:
        OptionError: shares that do not sum to 1, an unknown tier, place or schedule, or a number out of range.

    Example:
        >>> Plan(weights={"host": 0.5, "disk": 0.5}, micro_batch=32).kept_layers(4)
        (1, 3)
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {HOST: 1.0})
    kv: Mapping[str, float] = field(default_factory=lambda: {HOST: 1.0})
    values: float = 1.0
    ends: Ends = "host"
    schedule: Schedule = "zigzag"
    micro_batch: int = 32
    block: int | None = None
    prompt_rows: int = 512
    slots: int = SLOTS
    model: str = ""
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "kv"):
            object.__setattr__(self, name, _shares(name, getattr(self, name)))
        if self.schedule not in get_args(Schedule):
            raise unknown("schedule", str(self.schedule), get_args(Schedule))
        if self.ends not in get_args(Ends):
            raise unknown("place of the ends", str(self.ends), get_args(Ends))
        for name, min_value in (("micro_batch", 1), ("prompt_rows", 1), ("slots", 2)):
            _at_least(name, getattr(self, name), min_value)
        if isinstance(self.values, bool) or not isinstance(self.values, int | float) or not 0 < self.values <= 1:
            raise OptionError(f"plan: values={self.values!r} must be a share above 0 and at most 1")
        if self.values < 1 and (self.kv == {HOST: 1.0} or self.kv.get(DISK)):
            raise OptionError(
                f"plan: values={self.values:g} is for entries in the memory of a device's host, such as "
                "kv={'device': 0.5, 'host': 0.5}; runs of pages are read from a disk whole"
            )
        if self.block is not None:
            _at_least("block", self.block, 1)
            if self.schedule == "row" and self.block > self.micro_batch:
                raise OptionError(
                    f"plan: schedule 'row' runs one micro-batch in a sweep, so block={self.block} must not be more "
                    f"than micro_batch={self.micro_batch}; use 'zigzag'"
                )

    def share(self, of: Literal["weights", "kv"], tier: str) -> float:
        """Return the share of weights or KV in a tier, 0 to 1."""
        shares: Mapping[str, float] = getattr(self, of)
        return shares.get(tier, 0.0)

    def kept_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the indices of the layers whose weights stay in memory, spread evenly.

        These are as many whole layers as the share of weights outside the disk holds, rounded down.
        """
        return spread(self._whole(1 - self.share("weights", DISK), n_layers), n_layers)

    def device_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return those layers in memory whose weights are on the device, spread evenly.

        These are as many as their share holds, rounded down.
        """
        kept = self.kept_layers(n_layers)
        share = self.share("weights", DEVICE) * n_layers / max(len(kept), 1)
        return tuple(kept[index] for index in spread(self._whole(min(share, 1.0), len(kept)), len(kept)))

    def streamed_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the indices of the layers that are read in every sweep."""
        kept = set(self.kept_layers(n_layers))
        return tuple(i for i in range(n_layers) if i not in kept)

    def kv_layers_on_disk(self, n_layers: int) -> tuple[int, ...]:
        """Return the indices of the layers whose KV is on the disk.

        Those that stay in memory are as many as their share holds, rounded down.
        """
        kept = set(spread(self._whole(1 - self.share("kv", DISK), n_layers), n_layers))
        return tuple(i for i in range(n_layers) if i not in kept)

    def kv_layers_on_host(self, n_layers: int) -> tuple[int, ...]:
        """Return the indices of the layers that attend on the host of a device.

        Those with KV on a disk are among them. Those with KV on the device are as many as their share holds, rounded
        down.
        """
        if self.kv == {HOST: 1.0}:
            return ()
        on_disk = set(self.kv_layers_on_disk(n_layers))
        here = [i for i in range(n_layers) if i not in on_disk]
        n = min(self._whole(self.share("kv", DEVICE), n_layers), len(here))
        on_device = {here[i] for i in spread(n, len(here))}
        return tuple(i for i in range(n_layers) if i not in on_device)

    @staticmethod
    def _whole(share: float, n_layers: int) -> int:
        """Return how many whole layers a share holds."""
        return int(share * n_layers + n_layers * _ROUNDING)

    def check_model(self, fingerprint: str) -> None:
        """Check that the plan was made for this model.

        Raises:
            OptionError: it was made for another one.
        """
        if self.model and self.model != fingerprint:
            raise OptionError(
                f"plan: it was made for a model with the fingerprint {self.model}, and this one has {fingerprint}; "
                "make a plan for this model with 'millpond plan', with the same --weights"
            )


def spread(n: int, among: int) -> tuple[int, ...]:
    """Return the indices of `n` of `among` layers, spread evenly.

    Example:
        >>> spread(2, 5)
        (2, 4)
    """
    return tuple(i for i in range(among) if (i + 1) * n // among > i * n // among)


def _shares(name: str, shares: object) -> dict[str, float]:
    """Return checked shares, in the order of the tiers.

    Those that are 0 are left out, but a device's of KV.
    """
    if not isinstance(shares, Mapping):
        raise OptionError(f"plan: {name}={shares!r} must name shares of tiers, such as {{'host': 0.5, 'disk': 0.5}}")
    for tier, share in shares.items():
        if tier not in TIERS:
            raise unknown(f"tier of {name}", str(tier), TIERS)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise OptionError(f"plan: {name} on {tier} = {share!r} must be a share from 0 to 1")
    total = sum(shares.values())
    if abs(total - 1) > _ROUNDING:
        shares_text = ", ".join(f"{tier} {share:g}" for tier, share in shares.items()) or "none"
        raise OptionError(f"plan: shares of {name} ({shares_text}) sum to {total:g}; they must sum to 1")
    named = (DEVICE,) if name == "kv" else ()  # a device that holds none is one all the same
    return {tier: float(shares[tier]) for tier in TIERS if shares.get(tier) or (tier in named and tier in shares)}


def _at_least(name: str, value: object, min_value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < min_value:
        raise OptionError(f"plan: {name}={value!r} must be a whole number of at least {min_value}")


def sentences(plan: Plan) -> Iterator[str]:
    """Yield the figures of a plan that was searched for, one line each."""
    prediction = plan.prediction
    assert prediction is not None, "a plan that was searched for"
    disk = plan.share("weights", DISK)
    read = f", {disk:.0%} of the layers read in every sweep through {plan.slots} slots" if disk else ""
    ends = ", embeddings and head read from the disk" if plan.ends == DISK else ""
    if DEVICE in plan.kv:
        shares = ", ".join(f"{share:.0%} {tier}" for tier, share in plan.kv.items() if share)
        yield f"layers: {', '.join(f'{share:.0%} {tier}' for tier, share in plan.weights.items())}; their KV: {shares}"
    yield (
        f"block: {plan.block} sequences, micro-batch {plan.micro_batch}, {plan.prompt_rows} prompt tokens a sweep, "
        f"schedule {plan.schedule}{read}{ends}"
    )
    yield (
        f"predicted: prefill {prediction.prefill_tokens_per_s:,.1f} tok/s (bound by {prediction.prefill_bound}), "
        f"decode {prediction.decode_tokens_per_s:,.1f} tok/s (bound by {prediction.decode_bound})"
    )
    yield f"           {prediction.tokens_per_s:,.1f} new tokens/s over a block of {prediction.seconds:,.1f} s"
    for name, rate in prediction.what_if.items():
        yield f"with {name}: {rate:,.1f} tok/s ({rate / prediction.tokens_per_s - 1:+.0%})"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Parts of plans that an engine can carry out.

    Attributes:
        weights: Tiers that may hold weights.
        kv: Tiers that may hold KV.
        ends: Tiers of `weights` that may hold embeddings and head.
        schedules: Schedules that it runs.
        micro_batches: Whether products of a block may pass a layer in several parts.
    """

    weights: tuple[str, ...] = (HOST, DISK)
    kv: tuple[str, ...] = (HOST, DISK)
    ends: tuple[Ends, ...] = ("host", "disk")
    schedules: tuple[str, ...] = ("row", "zigzag", "diagonal")
    micro_batches: bool = False

    def check(self, plan: Plan) -> None:
        """Check that an engine can carry out a plan.

        Raises:
            OptionError: the plan uses a tier or a schedule that the engine does not run; the message says which it
                does.
        """
        for name, shares, tiers in (("weights", plan.weights, self.weights), ("kv", plan.kv, self.kv)):
            for tier, share in shares.items():
                if share and tier not in tiers:
                    reason = "no accelerator is used" if tier == DEVICE else "this engine does not move it there yet"
                    raise OptionError(
                        f"plan: {share:.0%} of the {name} on the tier {tier!r}: {reason}; {name} may lie on "
                        f"{' or '.join(tiers)}"
                    )
        if plan.schedule not in self.schedules:
            raise OptionError(
                f"plan: the schedule {plan.schedule!r} is known to the cost model, but this engine does not run it "
                f"yet; use {' or '.join(map(repr, self.schedules))}"
            )


#: Capabilities of the engine in this package.
ENGINE = Capabilities()
#: Capabilities that the cost model knows.
EVERYTHING = Capabilities(
    weights=(DEVICE, HOST, DISK), kv=(DEVICE, HOST, DISK), schedules=("row", "zigzag", "diagonal"), micro_batches=True
)


#: Version of the file: changes when the meaning of a field does.
FORMAT = 1
#: Most bytes of a plan.
MAX_BYTES = 1 << 20


def to_json(plan: Plan) -> str:
    """Return a plan as JSON text that `from_json` reads."""
    plan_fields = asdict(plan)
    if plan.values == 1:  # which versions without the field read alike
        del plan_fields["values"]
    return json.dumps({"format": FORMAT, **plan_fields}, indent=1) + "\n"


def from_json(text: str | bytes) -> Plan:
    """Return a plan from the text of `to_json`, or one written by hand.

    Every field may be left out.

    Raises:
        DataError: it is no JSON object, of another format, or a prediction is damaged.
        OptionError: an unknown field, or a value that `Plan` refuses.
    """
    try:
        plan_fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"plan: no JSON: {error}; make one with 'millpond plan --json'") from error
    if not isinstance(plan_fields, dict):
        raise DataError(
            f"plan: {type(plan_fields).__name__} in place of a JSON object with fields such as weights and kv"
        )
    if plan_fields.pop("format", FORMAT) != FORMAT:
        raise DataError("plan: of another version of this package; make one with 'millpond plan --json'")
    field_names = [field.name for field in fields(Plan)]
    for name in plan_fields:
        if name not in field_names:
            raise unknown("field of a plan", name, field_names)
    if not isinstance(plan_fields.get("model", ""), str):
        raise OptionError(f"plan: model={plan_fields['model']!r} must be a fingerprint, or be left out")
    prediction = plan_fields.pop("prediction", None)
    return Plan(**plan_fields, prediction=None if prediction is None else _prediction(prediction))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan under another name and rename the file.

    Raises:
        OptionError: the file cannot be written.
    """
    target = Path(path)
    try:
        publish(write_part(target, to_json(plan).encode()), target)
    except OSError as error:
        raise OptionError(f"{target} cannot be written: {error.strerror or error}") from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return a plan from a file.

    Raises:
        OptionError: it cannot be read; or see `from_json`.
        DataError: see `from_json`.
    """
    content = read_file(path)
    if len(content) > MAX_BYTES:
        raise DataError(f"{os.fspath(path)}: {len(content):,} bytes are too many for a plan (at most {MAX_BYTES:,})")
    return from_json(content)


def _prediction(parsed: Any) -> Prediction:
    """Return a prediction from parsed JSON.

    Raises:
        DataError: it is not as `to_json` writes it.
    """
    try:
        prediction: Prediction = as_type(Prediction, parsed)
    except TypeError as error:
        raise DataError(f"plan: a damaged prediction ({error!r}); leave it out") from error
    if not prediction.bytes.keys() <= set(TIERS):
        raise DataError("plan: a damaged prediction; leave it out")
    return prediction
