"""Specification of a named number format: storage of keys and values, and requirements on the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from millpond.codec.basis import KeyScales
from millpond.errors import OptionError
from millpond.kernels.packed.layout import Format, PackedLayout, Side

#: Bits of a number in a plain page of a codec.
PLAIN_BITS = 16
#: `Codec.share` is in units of this.
WHOLE = 10_000


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that calibration made for one layer (KVQuant): of `Side.table` and `Side.cuts`."""

    key: tuple[float, ...]
    value: tuple[float, ...]
    key_cuts: tuple[float, ...] = ()
    value_cuts: tuple[float, ...] = ()


class Calibrated(Protocol):
    """What is known of a model: see `calibration.Calibration`."""

    def tables(self, layer: int, codec: Codec) -> Tables:
        """The tables of one layer."""
        ...

    def key_range(self, layer: int) -> tuple[Tensor, Tensor]:
        """Scales and zeros (Hkv, D) float32 of the keys of one layer."""
        ...

    def digest(self) -> str:
        """A short text that differs where key ranges or tables differ."""
        ...


@dataclass(frozen=True, slots=True)
class Codec:
    """A number format by name.

    Attributes:
        name: as a user writes it.
        key, value: how each is stored; tables are filled in per layer.
        slots: the smallest page that holds whole groups.
        residual: newest entries that stay in plain pages; they are sealed in runs of `layout.grain`. Of a tier by age:
            newest entries that stay in the tiers before it.
        share: the same, in hundredths of a percent of the entries that a head holds, in addition to `residual`.
        sinks: first entries of the text that stay in plain pages.
        pre_rope: keys are stored before RoPE.
        rotated: queries, keys and values pass a Hadamard rotation, see `rotate`.
        balanced: keys are balanced against the prompt's queries, see `balance`.
        prune: share of key channels dropped after the prompt, see `channels`.
        tiered: entries that a method would evict are demoted to this format instead (MiKV).
        calibrated: needs a calibration file of the same model.
        key_outliers, value_outliers: share of the numbers of a page that are stored as outliers.
        calibration: the result of calibration, where `calibrated` and given.
        key_scales: of the keys of a model with large biases, for sides that are `less_mean`; None: 1.
        paper: where it comes from.
        ages: the tiers that entries pass through as they grow old, the first of which has the sides of this codec; ()
            where there is one. See `by_age`.
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
    def tiers(self) -> tuple[Codec, ...]:
        """The formats of packed pages, that of the newest codes first."""
        return self.ages or (self,)

    def newest(self, held: int) -> int:
        """How many of the newest of `held` entries stay in the tiers before this one."""
        return self.residual + held * self.share // WHOLE

    def layout(
        self, key_dim: int, value_dim: int, slots: int | None = None, tables: Tables | None = None
    ) -> PackedLayout:
        """The bytes of a page of `slots` entries.

        Args:
            key_dim: channels of a key that are stored: after pruning, where there is any.
            slots: None: the smallest page.
            tables: of this layer, where the codec is `calibrated`.

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
        key = replace(key, n_extra=round(self.key_outliers * slots * key_dim))
        value = replace(value, n_extra=round(self.value_outliers * slots * value_dim))
        return PackedLayout(slots, key_dim, value_dim, key, value)

    def check_dims(self, key_dim: int, value_dim: int) -> None:
        """
        Raises:
            OptionError: a head_dim that the groups do not divide.
        """
        for tier in self.tiers:
            tier.layout(key_dim, value_dim, tables=tier._any_tables())

    def bits_per_element(self, key_dim: int, value_dim: int, slots: int | None = None) -> float:
        """Bits per number of a sealed page, scales, zeros and outliers included; of tiers by age, the mean by share."""
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
        return Tables(*(tuple(map(float, range(1 << s.format.bits))) for s in (self.key, self.value)))


def before_rope(codec: Codec) -> Codec:
    """The same format with keys that are stored before RoPE, so that their positions may change.

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
    changed = codec.rotated or codec.balanced or codec.tiered or codec.prune > 0
    if changed or not codec.key.per_channel:
        raise OptionError(
            f"codec {codec.name!r} cannot store keys before RoPE, which texts longer than the model's context need "
            "(overflow='rolling'): it changes keys otherwise too, or has scales per token; use int8, int4, int3, int2, "
            "kivi4, kivi2, fp8, kvquant4, kvquant3, kvquant2 or bf16"
        )
    return replace(codec, pre_rope=True)


def joined(key: Codec, value: Codec) -> Codec:
    """The keys of one format with the values of another, as ("bf16", "int4").

    Raises:
        OptionError: formats that ask the cache for different things.
    """
    for what in ("pre_rope", "rotated", "balanced", "tiered", "calibrated", "prune"):
        if getattr(key, what) != getattr(value, what):
            raise OptionError(
                f"keys as {key.name!r} and values as {value.name!r} cannot share a page: only one of them is {what}"
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
