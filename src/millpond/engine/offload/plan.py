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
        seconds: from the first prompt token to the last new token of one block.
        prefill_s, decode_s: its two parts.
        tokens_per_s: new tokens of the block over `seconds`.
        prefill_tokens_per_s, decode_tokens_per_s: prompt tokens over `prefill_s`, new tokens over `decode_s`.
        prefill_bound, decode_bound: what takes longest in a sweep: "disk reads", "disk writes", "link", "compute" or
            "attention".
        bytes: by tier, then by purpose; what tiers that can be addressed hold at the peak.
        what_if: tokens per second of the best plan when one thing changes, by a name of the change.
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
        """Bytes of all purposes in a tier."""
        return sum(self.bytes.get(tier, {}).values())


#: Tiers, from the nearest to the farthest from where products are computed.
DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")
#: Order in which micro-batches and layers run: see `Plan`.
Schedule = Literal["row", "zigzag", "diagonal"]
#: Where embeddings and head lie; "host" is the device's memory where there is one.
Ends = Literal["host", "disk"]
#: Slots for layers on their way: one in use, two being read.
SLOTS = 3
#: Most by which shares may miss 1.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model runs that need not fit in memory.

    Attributes:
        weights, kv: shares of the tiers "device", "host" and "disk"; each sums to 1. These are shares of the layers, of
            all sequences alike: the last norm always stays in memory, and so do positions and scores of entries.
        ends: where embeddings and head lie. On the "disk" the head is read in tiles after the layers of each sweep, and
            of embeddings the rows of the sweep's tokens.
        schedule: "row" runs one micro-batch in each sweep over the layers; "zigzag" runs all micro-batches of a block
            in one sweep, so that they share one reading of the weights, and begins the next block when it has ended;
            "diagonal" as "zigzag", but sequences begin spread evenly over the length of an answer while many wait, and
            memory holds their mean cache rather than the largest: see `EngineConfig.spread_ages`.
        micro_batch: sequences that pass a layer at a time; of KV on a disk as many are read together.
        block: sequences that share a sweep; None: as many as fit.
        prompt_rows: prompt tokens in one sweep, at most.
        slots: layers in memory at a time of those that are on disk.
        model: fingerprint of the model that it was made for; empty: any.
        prediction: what was predicted when it was made; None for a plan written by hand.

    Raises:
        OptionError: shares that do not sum to 1, an unknown tier, place or schedule, or a number out of range.

    Example:
        >>> Plan(weights={"host": 0.5, "disk": 0.5}, micro_batch=32).kept_layers(4)
        (1, 3)
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {HOST: 1.0})
    kv: Mapping[str, float] = field(default_factory=lambda: {HOST: 1.0})
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
        for name, least in (("micro_batch", 1), ("prompt_rows", 1), ("slots", 2)):
            _at_least(name, getattr(self, name), least)
        if self.block is not None:
            _at_least("block", self.block, 1)
            if self.schedule == "row" and self.block > self.micro_batch:
                raise OptionError(
                    f"plan: schedule 'row' runs one micro-batch in a sweep, so block={self.block} must not be more "
                    f"than micro_batch={self.micro_batch}; use 'zigzag'"
                )

    def share(self, of: Literal["weights", "kv"], tier: str) -> float:
        """Share of weights or KV in a tier, 0 to 1."""
        shares: Mapping[str, float] = getattr(self, of)
        return shares.get(tier, 0.0)

    def kept_layers(self, n_layers: int) -> tuple[int, ...]:
        """Indices of the layers whose weights stay in memory, spread evenly between those that are read.

        As many whole layers as the share of weights outside the disk holds, rounded down.
        """
        return spread(self._whole(1 - self.share("weights", DISK), n_layers), n_layers)

    def device_layers(self, n_layers: int) -> tuple[int, ...]:
        """Of the layers that stay in memory, those whose weights lie on the device: as many as their share, rounded
        down, spread evenly."""
        kept = self.kept_layers(n_layers)
        share = self.share("weights", DEVICE) * n_layers / max(len(kept), 1)
        return tuple(kept[i] for i in spread(self._whole(min(share, 1.0), len(kept)), len(kept)))

    def streamed_layers(self, n_layers: int) -> tuple[int, ...]:
        """Indices of the layers that are read in every sweep."""
        kept = set(self.kept_layers(n_layers))
        return tuple(i for i in range(n_layers) if i not in kept)

    def kv_layers_on_disk(self, n_layers: int) -> tuple[int, ...]:
        """Indices of the layers whose KV lies on the disk; those that stay are as many as their share, rounded down."""
        kept = set(spread(self._whole(1 - self.share("kv", DISK), n_layers), n_layers))
        return tuple(i for i in range(n_layers) if i not in kept)

    @staticmethod
    def _whole(share: float, n_layers: int) -> int:
        """How many whole layers a share holds."""
        return int(share * n_layers + n_layers * _ROUNDING)

    def check_model(self, fingerprint: str) -> None:
        """
        Raises:
            OptionError: the plan was made for another model.
        """
        if self.model and self.model != fingerprint:
            raise OptionError(
                f"plan: it was made for a model with the fingerprint {self.model}, and this one has {fingerprint}; "
                "make a plan for this model with 'millpond plan', with the same --weights"
            )


def spread(n: int, among: int) -> tuple[int, ...]:
    """Indices of `n` of `among` layers, spread evenly.

    Example:
        >>> spread(2, 5)
        (2, 4)
    """
    return tuple(i for i in range(among) if (i + 1) * n // among > i * n // among)


def _shares(name: str, given: object) -> dict[str, float]:
    """Checked shares, in the order of the tiers, without those that are 0."""
    if not isinstance(given, Mapping):
        raise OptionError(f"plan: {name}={given!r} must name shares of tiers, such as {{'host': 0.5, 'disk': 0.5}}")
    for tier, share in given.items():
        if tier not in TIERS:
            raise unknown(f"tier of {name}", str(tier), TIERS)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise OptionError(f"plan: {name} on {tier} = {share!r} must be a share from 0 to 1")
    total = sum(given.values())
    if abs(total - 1) > _ROUNDING:
        shown = ", ".join(f"{tier} {share:g}" for tier, share in given.items()) or "none"
        raise OptionError(f"plan: shares of {name} ({shown}) sum to {total:g}; they must sum to 1")
    return {tier: float(given[tier]) for tier in TIERS if given.get(tier)}


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"plan: {name}={value!r} must be a whole number of at least {least}")


def sentences(plan: Plan) -> Iterator[str]:
    """What a plan that was searched for comes to, one line each."""
    found = plan.prediction
    assert found is not None, "a plan that was searched for"
    disk = plan.share("weights", DISK)
    read = f", {disk:.0%} of the layers read in every sweep through {plan.slots} slots" if disk else ""
    ends = ", embeddings and head read from the disk" if plan.ends == DISK else ""
    yield (
        f"block: {plan.block} sequences, micro-batch {plan.micro_batch}, {plan.prompt_rows} prompt tokens a sweep, "
        f"schedule {plan.schedule}{read}{ends}"
    )
    yield (
        f"predicted: prefill {found.prefill_tokens_per_s:,.1f} tok/s (bound by {found.prefill_bound}), decode "
        f"{found.decode_tokens_per_s:,.1f} tok/s (bound by {found.decode_bound})"
    )
    yield f"           {found.tokens_per_s:,.1f} new tokens/s over a block of {found.seconds:,.1f} s"
    for name, rate in found.what_if.items():
        yield f"with {name}: {rate:,.1f} tok/s ({rate / found.tokens_per_s - 1:+.0%})"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can carry out of what a plan can say.

    Attributes:
        weights, kv: tiers that may hold them. ends: those that may hold embeddings and head, of `weights`.
        schedules: that it runs.
        micro_batches: whether products of a block may pass a layer in several parts.
    """

    weights: tuple[str, ...] = (HOST, DISK)
    kv: tuple[str, ...] = (HOST, DISK)
    ends: tuple[Ends, ...] = ("host", "disk")
    schedules: tuple[str, ...] = ("row", "zigzag", "diagonal")
    micro_batches: bool = False

    def check(self, plan: Plan) -> None:
        """
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


#: Of the engine in this package.
ENGINE = Capabilities()
#: Everything that the cost model knows.
EVERYTHING = Capabilities(
    weights=(DEVICE, HOST, DISK), kv=(DEVICE, HOST, DISK), schedules=("row", "zigzag", "diagonal"), micro_batches=True
)


#: Changes when the meaning of a field does.
FORMAT = 1
#: Most bytes of a plan.
MOST_BYTES = 1 << 20


def to_json(plan: Plan) -> str:
    """A plan as JSON text that `from_json` reads."""
    return json.dumps({"format": FORMAT, **asdict(plan)}, indent=1) + "\n"


def from_json(text: str | bytes) -> Plan:
    """A plan from the text of `to_json`, or one written by hand: every field may be left out.

    Raises:
        DataError: it is no JSON object, of another format, or a prediction is damaged. OptionError: an unknown field,
            or a value that `Plan` refuses.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"plan: no JSON: {error}; make one with 'millpond plan --json'") from error
    if not isinstance(found, dict):
        raise DataError(f"plan: {type(found).__name__} in place of a JSON object with fields such as weights and kv")
    if found.pop("format", FORMAT) != FORMAT:
        raise DataError("plan: of another version of this package; make one with 'millpond plan --json'")
    known = [field.name for field in fields(Plan)]
    for name in found:
        if name not in known:
            raise unknown("field of a plan", name, known)
    if not isinstance(found.get("model", ""), str):
        raise OptionError(f"plan: model={found['model']!r} must be a fingerprint, or be left out")
    given = found.pop("prediction", None)
    return Plan(**found, prediction=None if given is None else _prediction(given))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan whole under another name and rename it.

    Raises:
        OptionError: the file cannot be written.
    """
    place = Path(path)
    try:
        publish(write_part(place, to_json(plan).encode()), place)
    except OSError as error:
        raise OptionError(f"{place} cannot be written: {error.strerror or error}") from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """A plan from a file.

    Raises:
        OptionError: it cannot be read; or see `from_json`. DataError: see `from_json`.
    """
    content = read_file(path)
    if len(content) > MOST_BYTES:
        raise DataError(f"{os.fspath(path)}: {len(content):,} bytes are too many for a plan (at most {MOST_BYTES:,})")
    return from_json(content)


def _prediction(given: Any) -> Prediction:
    """
    Raises:
        DataError: it is not what `to_json` writes.
    """
    try:
        prediction: Prediction = as_type(Prediction, given)
    except TypeError as error:
        raise DataError(f"plan: a damaged prediction ({error!r}); leave it out") from error
    if not prediction.bytes.keys() <= set(TIERS):
        raise DataError("plan: a damaged prediction; leave it out")
    return prediction
