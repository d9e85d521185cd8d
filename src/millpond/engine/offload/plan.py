"""Plan of a sweep: where weights and KV lie, in which order layers and micro-batches run, and how many sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from millpond.engine.offload.prediction import Prediction
from millpond.errors import OptionError, unknown

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
