# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Conversion of packed codes to numbers inside kernels: see `kernels.packed.layout` for their offsets."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.packed.layout import LANES as TILE_LANES
from millpond.kernels.packed.layout import MOST_NAMED, Format, Offsets, Side

FP8 = tl.constexpr(int(Format.FP8))
ROWS = tl.constexpr(int(Format.ROWS))
FIRST_TABLE = tl.constexpr(int(Format.NUQ2))
LANES = tl.constexpr(TILE_LANES)
NAMED = tl.constexpr(MOST_NAMED)
EXTRA_STEP = tl.constexpr(64)  #: outliers that are written at once


def side_constants(prefix: str, side: Side, at: Offsets, dim: int) -> dict[str, int]:
    """What a kernel knows of one side when it is compiled."""
    return {
        f"{prefix}_FORMAT": int(side.format),
        f"{prefix}_BITS": side.format.bits,
        f"{prefix}_CODES": at.codes,
        f"{prefix}_TOP": at.top,
        f"{prefix}_SCALES": at.scales,
        f"{prefix}_ZEROS": at.zeros,
        f"{prefix}_GROUP": side.group or dim,
        f"{prefix}_BY_CHANNEL": side.by_channel,
        f"{prefix}_FIXED": side.fixed,
        f"{prefix}_MEANS": at.means,
        f"{prefix}_EXTRA": at.extra,
        f"{prefix}_N_EXTRA": side.n_extra,
    }


def table_or(table: Tensor, other: Tensor) -> Tensor:
    """The table on the device of `other`; `other`, which is not read, where there is none."""
    return table.to(other.device) if table.numel() else other


@triton.jit
def bits_at(page, at: tl.constexpr, words: tl.constexpr, tile, lane, depth, ok, BITS: tl.constexpr):
    """BITS bits of codes number `depth` of a lane of a tile of `words` words per lane."""
    per: tl.constexpr = 32 // BITS
    pointer = (page + at).to(tl.pointer_type(tl.int32)) + (tile * words + depth // per) * LANES + lane
    e = depth % per
    return (tl.load(pointer, mask=ok, other=0) >> (BITS * (e // 2) + 16 * (e % 2))) & ((1 << BITS) - 1)


@triton.jit
def codes_at(
    page, tile, lane, depth, ok, CODES: tl.constexpr, TOP: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr
):
    """Codes (int32) of a page; DEPTH: how many a lane holds."""
    if BITS == 3:
        low = bits_at(page, CODES, DEPTH // 16, tile, lane, depth, ok, 2)
        return low | (bits_at(page, TOP, (DEPTH + 31) // 32, tile, lane, depth, ok, 1) << 2)
    else:
        return bits_at(page, CODES, DEPTH * BITS // 32, tile, lane, depth, ok, BITS)


@triton.jit
def from_e4m3(code):
    """The number of a code of 8 bits; NaN, which is never stored, would be 480."""
    size = code & 127
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return tl.where(code > 127, -number, number)


@triton.jit
def numbers_at(
    page,
    tile,
    lane,
    depth,
    slot,
    channel,
    ok,
    numbers,
    fixed_scales,
    fixed_zeros,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    TOP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FIXED: tl.constexpr,
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    MEANS: tl.constexpr,
):
    """The numbers (float32) in slots x channels of a page, 0 where not `ok`.

    tile, lane, depth: where the code of each lies. numbers: of a table format. fixed_scales, fixed_zeros: of the
    channels of this head, where they were calibrated.
    """
    if FORMAT == ROWS:
        rows = (page + CODES).to(tl.pointer_type(tl.bfloat16)) + slot * DIM + channel
        return tl.load(rows, mask=ok, other=0.0).to(tl.float32)
    else:
        code = codes_at(page, tile, lane, depth, ok, CODES, TOP, DEPTH, BITS)
        if FORMAT == FP8:
            scale = tl.load((page + SCALES).to(tl.pointer_type(tl.float32)))
            return tl.where(ok, from_e4m3(code) * scale, 0.0)
        else:
            if BY_CHANNEL:
                factor = slot // GROUP * DIM + channel
            else:
                factor = channel // GROUP * SLOTS + slot
            x = code.to(tl.float32)
            if FORMAT >= FIRST_TABLE:
                x = tl.load(numbers + code, mask=ok, other=0.0)
            elif ZEROS < 0 and not FIXED:
                x = x - (1 << (BITS - 1))  # symmetric: codes stand around 0
            if FIXED:
                x = x * tl.load(fixed_scales + channel, mask=ok, other=0.0)
                x += tl.load(fixed_zeros + channel, mask=ok, other=0.0)
            else:
                scales = (page + SCALES).to(tl.pointer_type(tl.float16)) + factor
                x = x * tl.load(scales, mask=ok, other=0.0).to(tl.float32)
                if ZEROS >= 0:
                    zeros = (page + ZEROS).to(tl.pointer_type(tl.float16)) + factor
                    x += tl.load(zeros, mask=ok, other=0.0).to(tl.float32)
            if MEANS >= 0:
                means = (page + MEANS).to(tl.pointer_type(tl.float16)) + channel
                x += tl.load(means, mask=ok, other=0.0).to(tl.float32)
            return tl.where(ok, x, 0.0)


@triton.jit
def beside_at(
    page, slot, channel, EXTRA: tl.constexpr, N_EXTRA: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """(BLOCK, DIM_BLOCK) float32: what the codes of the slots (BLOCK,) of a page lack, in the channels (DIM_BLOCK,).

    Two products with at most one number in a sum, so exact: a kernel cannot scatter into a tile.
    """
    lacks = tl.zeros([BLOCK, DIM_BLOCK], tl.float32)
    for first in range(0, N_EXTRA, EXTRA_STEP):
        e = first + tl.arange(0, EXTRA_STEP)
        ok = e < N_EXTRA
        place = tl.load((page + EXTRA).to(tl.pointer_type(tl.int16)) + e, mask=ok, other=0).to(tl.int32) & 0xFFFF
        what = tl.load((page + EXTRA + 2 * N_EXTRA).to(tl.pointer_type(tl.float16)) + e, mask=ok, other=0.0)
        rows = (slot[:, None] == (place // NAMED)[None, :]).to(tl.float16)
        columns = tl.where(channel[None, :] == (place % NAMED)[:, None], what[:, None], 0.0).to(tl.float16)
        lacks += tl.dot(rows, columns)
    return lacks
