"""Specification of a named number format: storage of keys and values, and requirements on the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from millpond.codec.basis import KeyScales
from millpond.errors import OptionError
from millpond.kernels.packed.layout import ROOM, Format, PackedLayout, Side, outer_count

#: Bits of a number in a plain page of a codec.
PLAIN_BITS = 16
#: `Codec.share` is in units of this.
WHOLE = 10_000


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of one layer by calibration (KVQuant), those of `Side`, and its KV heads.

    Where no model is known there are 8 heads.
    """

    key: tuple[float, ...]
    value: tuple[float, ...]
    key_cuts: tuple[float, ...] = ()
    value_cuts: tuple[float, ...] = ()
    n_kv_heads: int = 8


class Calibrated(Protocol):
    """Calibration of a model as a codec uses it, see `calibration.Calibration`."""

    def tables(self, layer: int, codec: Codec) -> Tables:
        """Return the tables of one layer."""
        ...

    def key_range(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return scales and zeros (Hkv, D) float32 of the keys of one layer."""
        ...

    def digest(self) -> str:
        """Return a short text that differs if key ranges or tables differ."""
        ...


@dataclass(frozen=True, slots=True)
class Codec:
    """Number format with a name.

    Attributes:
        name: Name as a user writes it.
        key: Storage of keys; tables are filled in per layer.
        value: Storage of values, likewise.
        slots: Entries of the smallest page that holds whole groups.
        residual: Newest entries that stay in plain pages; they are quantized in runs of `layout.grain`. For a format by
            age, the newest entries that stay in the formats before it.
        sinks: First entries of the text that stay in plain pages.
        pre_rope: Keys are stored before RoPE.
        rotated: Queries, keys and values pass a Hadamard rotation, see `rotate`.
        balanced: Keys are balanced against the prompt's queries, see `channels.query_balance`.
        prune: Share of key channels dropped after the prompt, see `channels`.
        prune_values: Share of value channels dropped after the prompt, likewise.
        tiered: Entries that a method would evict are demoted to this format instead (MiKV).
        calibrated: Whether a calibration file of the same model is needed.
        key_outliers: Share of the keys of a page that are stored as outliers.
        value_outliers: Share of the values of a page that are stored as outliers.
        calibration: Calibration, if `calibrated` and one is given.
        key_scales: Scales of keys of a model with large biases, for sides that are `less_mean`; None for 1.
        paper: arXiv number of the paper whose format it is, also where some of it departs; "" for a format of none.
            `docs/generate.py` lists formats with it on the page of the papers.
        share: The same, in hundredths of a percent of the entries that a head holds, in addition to `residual`.
        ages: Formats that entries pass through as they grow old, the first of which has the sides of this codec; () if
            there is only one. See `by_age`.
    """

    name: str
    key: Side
    value: Side
    slots: int = 32
    residual: int = 0
    sinks: int = 0
    pre_rope: bool = False
    rotated: bool = False
    balanced: bool = False
    prune: float = 0.0
    prune_values: float = 0.0
    tiered: bool = False
    calibrated: bool = False
    key_outliers: float = 0.0
    value_outliers: float = 0.0
    calibration: Calibrated | None = None
    key_scales: KeyScales | None = None
    paper: str = ""
    share: int = 0
    ages: tuple[Codec, ...] = ()

    @property
    def across_heads(self) -> bool:
        """Whether ranges and outliers are those of a token over all KV heads, which must all hold it."""
        return self.key.across_heads or self.value.across_heads

    @property
    def tiers(self) -> tuple[Codec, ...]:
        """Formats of packed pages, that of the newest codes first."""
        return self.ages or (self,)

    def newest(self, n_entries: int) -> int:
        """Return how many of the newest of `held` entries stay in the formats before this one."""
        return self.residual + n_entries * self.share // WHOLE

    def layout(
        self, key_dim: int, value_dim: int, slots: int | None = None, tables: Tables | None = None
    ) -> PackedLayout:
        """Return the layout of a page of `slots` entries.

        Args:
            key_dim: Channels of a key that are stored, after any pruning.
            value_dim: Channels of a value that are stored, likewise.
            slots: Entries of the page; None for the smallest page.
            tables: Tables of this layer, if the codec is `calibrated`.

        Raises:
            OptionError: a head_dim or page size that the groups do not divide, or missing tables.
        """
        slots = slots or self.slots
        if self.calibrated and tables is None:
            raise OptionError(
                f"codec {self.name!r} needs a calibration of this model: make one with 'millpond calibrate', and give "
                "its file as calibration"
            )
        key, value = self.key, self.value
        if tables is not None:
            key = replace(key, table=tables.key, cuts=tables.key_cuts)
            value = replace(value, table=tables.value, cuts=tables.value_cuts)
        n_heads = 1 if tables is None else tables.n_kv_heads
        key = _with_places(key, self.key_outliers, slots, key_dim, n_heads)
        value = _with_places(value, self.value_outliers, slots, value_dim, n_heads)
        return PackedLayout(slots, key_dim, value_dim, key, value)

    def check_dims(self, key_dim: int, value_dim: int) -> None:
        """Check that the groups divide the dimensions of keys and values.

        Raises:
            OptionError: a head_dim that the groups do not divide.
        """
        for tier in self.tiers:
            tier.layout(key_dim, value_dim, tables=tier._any_tables())

    def bits_per_element(self, key_dim: int, value_dim: int, slots: int | None = None) -> float:
        """Return bits per number of a quantized page, scales, zeros and outliers included.

        Of formats by age it is the mean by share.
        """
        if not self.ages:
            return self.layout(key_dim, value_dim, slots, self._any_tables()).bits_per_element
        ends = [*(tier.share for tier in self.ages[1:]), WHOLE]
        each = [
            (end - tier.share) * tier.bits_per_element(key_dim, value_dim, slots)
            for tier, end in zip(self.ages, ends, strict=True)
        ]
        return (self.share * PLAIN_BITS + sum(each)) / WHOLE

    def _any_tables(self) -> Tables | None:
        if not self.calibrated:
            return None
        key, value = (tuple(map(float, range(1 << s.format.bits))) for s in (self.key, self.value))
        return Tables(key, value)


def _with_places(side: Side, share: float, slots: int, dim: int, n_heads: int) -> Side:
    """Return the side of a page with places for a share of its numbers as outliers."""
    if not side.across_heads:
        return replace(side, n_extra=round(share * slots * dim))
    n = outer_count(share, n_heads * dim)  # at each end of a token
    return replace(side, n_outer=n, n_extra=min(2 * n * slots * ROOM // n_heads, 2 * n * slots, dim * slots))


def before_rope(codec: Codec) -> Codec:
    """Return the format with keys stored before RoPE, so that their positions may change.

    Raises:
        OptionError: its keys are stored in a way that a rotation does not go through.
    """
    if codec.ages:
        raise OptionError(
            f"codec {codec.name!r}: number formats by age are not there for texts longer than the model's context "
            "(overflow='rolling'); name one format"
        )
    if codec.pre_rope:
        return codec
    changed = codec.rotated or codec.balanced or codec.tiered or codec.prune > 0 or codec.prune_values > 0
    if changed or not codec.key.per_channel:
        raise OptionError(
            f"codec {codec.name!r} cannot store keys before RoPE, which texts longer than the model's context need "
            "(overflow='rolling'): it changes keys otherwise too, or has scales per token; use bf16 or, for "
            "example, int8, int4, kivi4 or fp8"
        )
    return replace(codec, pre_rope=True)


def joined(key: Codec, value: Codec) -> Codec:
    """Return the keys of one format with the values of another, as ("bf16", "int4").

    Raises:
        OptionError: formats that ask the cache for different things.
    """
    for feature in ("pre_rope", "rotated", "balanced", "tiered", "calibrated", "prune", "prune_values"):
        if getattr(key, feature) != getattr(value, feature):
            raise OptionError(
                f"keys as {key.name!r} and values as {value.name!r} cannot share a page: only one of them is {feature}"
            )
    return replace(
        key,
        name=f"{key.name}+{value.name}",
        value=value.value,
        slots=max(key.slots, value.slots),
        residual=max(key.residual, value.residual),
        sinks=max(key.sinks, value.sinks),
        value_outliers=value.value_outliers,
        paper=", ".join(dict.fromkeys(p for p in (key.paper, value.paper) if p)),
    )


def is_plain(codec: Codec) -> bool:
    """Whether pages of this codec hold numbers as they are on both sides."""
    return codec.key.format is Format.ROWS and codec.value.format is Format.ROWS
