"""Layout of codes in a page, one contiguous row of bytes, and the memory of a pool of such pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.pages import Arenas

#: Lanes of a tile; slots that a kernel works on at once.
LANES, RUN = 16, 32
#: Places for outliers of a page of one head, in multiples of its even share, where outliers are those of all heads.
ROOM = 2
#: Most slots and channels that an outlier can name: 8 bits each.
MAX_NAMED = 256


class Format(IntEnum):
    """Meaning of a code; the numbers are those of csrc/quantized/bit_tiles.hpp."""

    INT2 = 2
    INT3 = 3
    INT4 = 4
    INT8 = 8
    FP8 = 9  #: e4m3
    ROWS = 16  #: no code: bfloat16 as it is
    NUQ2 = 18  #: a table of 4, 8 or 16 numbers
    NUQ3 = 19
    NUQ4 = 20

    @property
    def bits(self) -> int:
        return 8 if self is Format.FP8 else self - 16 if self.uses_table else int(self)

    @property
    def uses_table(self) -> bool:
        return self in (Format.NUQ2, Format.NUQ3, Format.NUQ4)

    @property
    def grouped(self) -> bool:
        """Whether a group of numbers shares a scale."""
        return self not in (Format.FP8, Format.ROWS)


@dataclass(frozen=True, slots=True)
class Side:
    """Storage of keys, or values: scale * code + zero, or scale * table[code] + zero.

    Attributes:
        format: Meaning of the codes.
        by_channel: Keys only: a group is `group` neighbouring slots of one channel. Otherwise it is `group`
            neighbouring channels of one slot.
        group: Numbers that share a scale and a zero; 0: all channels of a slot.
        symmetric: No zero is stored: codes stand around 0.
        fixed: Keys only: scales and zeros per channel come from calibration and are stored outside the page.
        less_mean: Keys only, not by channel: a page stores the mean of its keys in each channel, and codes stand for
            what the keys are less it, so that channels far from 0 do not widen the range of all.
        across_heads: Formats with a table only: the range of a value, and the outliers of either side, are those of a
            token over all KV heads; each head's page stores them.
        n_outer: With `across_heads`, outliers at each end of a token over all KV heads.
        n_extra: Outliers per page, 4 bytes each, for the numbers with the largest error.
        table: Numbers of a table format, 2^bits ascending ones that bfloat16 holds exactly.
        cuts: Limits of a table format, the 2^bits - 1 ascending numbers between two codes; empty for halfway between
            the table's numbers.
    """

    format: Format
    by_channel: bool = False
    group: int = 0
    symmetric: bool = False
    fixed: bool = False
    less_mean: bool = False
    across_heads: bool = False
    n_outer: int = 0
    n_extra: int = 0
    table: tuple[float, ...] = ()
    cuts: tuple[float, ...] = ()

    @property
    def per_channel(self) -> bool:
        """Whether neighbouring slots share a channel's scale, or a page has one scale."""
        return self.format is Format.FP8 or (self.format.grouped and (self.by_channel or self.fixed))


@dataclass(frozen=True, slots=True)
class Offsets:
    """First bytes of arrays from the begin of a page, -1 for none; `size` is the side's bytes."""

    codes: int
    top: int  #: third bits of a three-bit code
    scales: int
    zeros: int
    means: int
    extra: int
    size: int
    begin: int = 0

    @property
    def factor_bytes(self) -> int:
        """Bytes from the scales on."""
        return self.begin + self.size - self.scales if self.scales >= 0 else 0


@dataclass(frozen=True)
class PackedLayout:
    """Layout of the bytes of one page.

    Raises:
        OptionError: a dim that is no multiple of 16, slots that are no power of two of at least 32, or a group that
            does not divide what it groups.
    """

    slots: int
    key_dim: int
    value_dim: int
    key: Side
    value: Side

    def __post_init__(self) -> None:
        if self.slots < RUN or self.slots & (self.slots - 1):
            raise OptionError(f"page_slots={self.slots}: pages of codes need a power of two of at least {RUN}")
        for noun, side, dim in (("keys", self.key, self.key_dim), ("values", self.value, self.value_dim)):
            _check_side(noun, side, dim, self.slots)

    @cached_property
    def key_offsets(self) -> Offsets:
        return _offsets(self.key, self.slots, self.key_dim, self.slots // LANES, self.key_dim, 0)

    @cached_property
    def value_offsets(self) -> Offsets:
        begin = self.key_offsets.size
        return _offsets(self.value, self.slots, self.value_dim, self.value_dim // LANES, self.slots, begin)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page: keys, then values, up to a whole cache line."""
        used = self.key_offsets.size + self.value_offsets.size
        return -(-used // 64) * 64

    @cached_property
    def tables(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Tables of keys and of values: numbers and cuts, float32, empty for no table."""
        key, value = ((table_of(side), cuts_of(side)) for side in (self.key, self.value))
        return key, value

    @property
    def bits_per_element(self) -> float:
        """Return bits per number of a key or value, scales, zeros and outliers included."""
        used = self.key_offsets.size + self.value_offsets.size
        return 8 * used / (self.slots * (self.key_dim + self.value_dim))

    @property
    def grain(self) -> int:
        """Entries that must be written together, from a multiple of it; 1 if no group spans slots."""
        spans = self.key.format is Format.FP8 or self.value.format is Format.FP8
        spans = spans or self.key.across_heads or self.value.across_heads
        if spans or self.key.n_extra or self.value.n_extra or self.key.less_mean:
            return self.slots
        return self.key.group if self.key.by_channel and self.key.format.grouped and not self.key.fixed else 1


def outer_count(share: float, n: int) -> int:
    """Return the outliers at each end of a token of `n` numbers: half the share, rounded up."""
    return math.ceil(share / 2 * n)


def table_of(side: Side) -> Tensor:
    """Return the numbers (2^bits,) float32 that codes of a table stand for."""
    return torch.tensor(side.table, device="cpu")


def cuts_of(side: Side) -> Tensor:
    """Return the cuts between codes of a table, (2^bits - 1,) float32."""
    table = table_of(side)
    return torch.tensor(side.cuts, device="cpu") if side.cuts else (table[1:] + table[:-1]) / 2


def groups_of(side: Side, dim: int) -> int:
    """Return how many groups the channels of one slot form, for a side not by channel."""
    return dim // side.group if side.group else 1


def _check_side(noun: str, side: Side, dim: int, slots: int) -> None:
    if dim % LANES or dim < LANES:
        raise OptionError(
            f"head_dim={dim}: codes need a multiple of {LANES} channels for {noun}; use codec='bf16' for this model"
        )
    if side.n_extra and not side.format.grouped:
        raise OptionError(f"{noun}: {side.format.name} keeps no outliers; only groups have ranges")
    if side.n_extra and max(slots, dim) > MAX_NAMED:
        raise OptionError(f"{noun}: outliers can be named among {MAX_NAMED} slots and channels, not {slots} x {dim}")
    if side.format.uses_table and len(side.table) != 1 << side.format.bits:
        raise OptionError(f"{noun}: {side.format.name} needs a table of {1 << side.format.bits} numbers")
    if side.across_heads and not (side.format.uses_table and (side.fixed or noun == "values") and not side.group):
        raise OptionError(f"{noun}: only a format with a table, and one range for a slot, has ranges over all heads")
    if noun == "values" and (side.fixed or side.by_channel):
        raise OptionError("values are grouped along the channels of a slot; only keys can be by channel")
    if side.less_mean and (noun == "values" or side.per_channel or not side.format.grouped):
        raise OptionError(f"{noun}: only keys with scales per slot are stored less the mean of their page")
    if not side.format.grouped or side.fixed:
        return
    if side.by_channel:
        if side.group < RUN or slots % side.group:
            raise OptionError(
                f"{noun}: a group of {side.group} slots must divide the page of {slots} slots and hold at least {RUN}"
            )
    elif side.group and (dim % side.group or side.group % LANES or (noun == "keys" and side.group % RUN)):
        smallest = RUN if noun == "keys" else LANES
        fits = [g for g in range(smallest, dim + 1, smallest) if dim % g == 0] or [dim]
        raise OptionError(
            f"head_dim={dim} does not fall into groups of {side.group} for {noun}; "
            f"groups that fit: {', '.join(map(str, fits))}, or 0 for the whole head"
        )


def _offsets(side: Side, slots: int, dim: int, tiles: int, depth: int, begin: int) -> Offsets:
    at = begin
    codes, top, scales, zeros, means, extra = at, -1, -1, -1, -1, -1
    if side.format is Format.ROWS:
        return Offsets(codes, top, scales, zeros, means, extra, 2 * slots * dim)
    low_bits = 2 if side.format.bits == 3 else side.format.bits
    at += tiles * (depth * low_bits // 32) * 4 * LANES
    if side.format.bits == 3:
        top = at
        at += tiles * -(-depth // 32) * 4 * LANES
    if side.format is Format.FP8:
        scales, at = at, at + 4
    elif not side.fixed:
        n = slots // side.group * dim if side.by_channel else slots * groups_of(side, dim)
        scales, at = at, at + 2 * n
        if not side.symmetric:
            zeros, at = at, at + 2 * n
    if side.less_mean:
        means, at = at, at + 2 * dim
    if side.n_extra:
        extra, at = at, at + 4 * side.n_extra
    return Offsets(codes, top, scales, zeros, means, extra, at - begin, begin)


@dataclass(slots=True)
class PackedArrays(Arenas):
    """Arenas with one row of bytes per page; position -1 marks a tombstone, an evicted entry.

    Attributes:
        layout: Layout of a page.
        codes: Per arena (pages_per_arena, page_bytes) uint8.
    """

    pages_per_arena: int
    layout: PackedLayout
    device: torch.device
    masses: bool = False
    codes: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    log_masses: list[Tensor] = field(default_factory=list)
    bases: Tensor = field(default_factory=lambda: torch.zeros(5, 0, dtype=torch.int64))
    slots: int = field(init=False)

    def __post_init__(self) -> None:
        self.slots = self.layout.slots

    @property
    def contents(self) -> list[list[Tensor]]:
        return [self.codes]

    def _add_contents(self, n_pages: int) -> None:
        self.codes.append(torch.empty(n_pages, self.layout.page_bytes, dtype=torch.uint8, device=self.device))
