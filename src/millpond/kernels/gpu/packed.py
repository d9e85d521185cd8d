"""Attention over quantized pages on the GPU: partial attention over splits, and codes converted inside kernels."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.gpu.attend import store_part, take_in
from millpond.kernels.gpu.both_parts import attend_both
from millpond.kernels.gpu.common import (
    INF,
    KEYS,
    LOG2_E,
    LOG_MASSES,
    POSITIONS,
    block_of,
    logit2,
    page_logs,
    rows_of,
    tile_rows,
)
from millpond.kernels.gpu.packed_words import TWO_128, attend_words, word_launch, word_shapes, words_serve
from millpond.kernels.packed.layout import LANES as TILE_LANES
from millpond.kernels.packed.layout import MAX_NAMED, RUN, Format, Offsets, Side, table_of
from millpond.kernels.packed.regions import PackedRegions

# mypy: disable-error-code="no-untyped-def, untyped-decorator"


FP8 = tl.constexpr(int(Format.FP8))
ROWS = tl.constexpr(int(Format.ROWS))
FIRST_TABLE = tl.constexpr(int(Format.NUQ2))
LANES = tl.constexpr(TILE_LANES)
NAMED = tl.constexpr(MAX_NAMED)
EXTRA_STEP = tl.constexpr(64)  #: outliers that are written at once


def side_constants(prefix: str, side: Side, at: Offsets, dim: int) -> dict[str, int]:
    """Return the constants of one side that a kernel is compiled with."""
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


@cache
def numbers_on(side: Side, device: torch.device) -> Tensor:
    """Return the numbers that codes of a table stand for, on a device.

    They stay there. Nothing is copied while a step is recorded: a step runs once before.
    """
    with torch.inference_mode(False):
        return table_of(side).to(device)


@triton.jit
def bits_at(page, at: tl.constexpr, words: tl.constexpr, tile, lane, depth, ok, BITS: tl.constexpr):
    """Return BITS bits of codes number `depth` of a lane of a tile of `words` words per lane."""
    per: tl.constexpr = 32 // BITS
    pointer = (page + at).to(tl.pointer_type(tl.int32)) + (tile * words + depth // per) * LANES + lane
    e = depth % per
    return (tl.load(pointer, mask=ok, other=0) >> (BITS * (e // 2) + 16 * (e % 2))) & ((1 << BITS) - 1)


@triton.jit
def codes_at(
    page, tile, lane, depth, ok, CODES: tl.constexpr, TOP: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr
):
    """Return codes (int32) of a page; DEPTH: how many a lane holds."""
    if BITS == 3:
        low = bits_at(page, CODES, DEPTH // 16, tile, lane, depth, ok, 2)
        return low | (bits_at(page, TOP, (DEPTH + 31) // 32, tile, lane, depth, ok, 1) << 2)
    else:
        return bits_at(page, CODES, DEPTH * BITS // 32, tile, lane, depth, ok, BITS)


@triton.jit
def from_e4m3(code):
    """Return the number of a code of 8 bits; NaN, which is never stored, would be 480."""
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
    """Return the numbers (float32) in slots x channels of a page, 0 where not `ok`.

    tile, lane and depth are the place of each code; numbers are those of a table format; fixed_scales and fixed_zeros
    those of the channels of this head, where they were calibrated.
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
    """Return (BLOCK, DIM_BLOCK) float32: the outliers' remainders in slots of a page.

    Slots are (BLOCK,), channels (DIM_BLOCK,). Two products with at most one number in a sum, so exact: a kernel cannot
    scatter into a tile.
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


@triton.jit(do_not_specialize=["n_arenas", "n_splits", "first_split", "n_turns", "window"])
def attend_packed(
    q,
    q_s,
    q_h,
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    q_pos,
    part_out,
    part_max,
    part_sum,
    logits,
    n_splits,
    first_split,
    key_numbers,
    value_numbers,
    key_scales,
    key_zeros,
    channels,
    balance,
    turns,
    turn_cos,
    turn_sin,
    n_turns,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_BITS: tl.constexpr,
    K_CODES: tl.constexpr,
    K_TOP: tl.constexpr,
    K_SCALES: tl.constexpr,
    K_ZEROS: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_BY_CHANNEL: tl.constexpr,
    K_FIXED: tl.constexpr,
    K_MEANS: tl.constexpr,
    K_EXTRA: tl.constexpr,
    K_N_EXTRA: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_BITS: tl.constexpr,
    V_CODES: tl.constexpr,
    V_TOP: tl.constexpr,
    V_SCALES: tl.constexpr,
    V_ZEROS: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_BY_CHANNEL: tl.constexpr,
    V_FIXED: tl.constexpr,
    V_MEANS: tl.constexpr,
    V_EXTRA: tl.constexpr,
    V_N_EXTRA: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    DOT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_BALANCE: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
):
    """Compute output, maximum and sum of one split for all query heads of a region.

    It is split first_split + program number of n_splits. BLOCK slots are in one page. A slot at position -1 holds
    nothing. Where keys are stored before RoPE, one of them meets the query twice: times the cosines of its position as
    it is, and times the sines with the channels of each pair of the query exchanged.
    """
    SLOTS: tl.constexpr = 1 << LOG_SLOTS
    r = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    begin = split * SPLIT
    s = r // HEADS
    here = tl.load(q_pos + s)
    n = tl.load(lens + r)
    if here < 0 or begin >= n:
        return
    end = tl.minimum(n, begin + SPLIT)
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, KEY_BLOCK)
    e = tl.arange(0, VALUE_BLOCK)
    head = (r % HEADS) * GROUP + g
    q_channel = d
    if HAS_CHANNELS:
        q_channel = tl.load(channels + r * KEY_DIM + d, mask=d < KEY_DIM, other=0)
    q_mask = (g < GROUP)[:, None] & (d < KEY_DIM)[None, :]
    q_tile = tl.load(q + s * q_s + head[:, None] * q_h + q_channel[None, :], mask=q_mask, other=0.0)  # (G, K)
    if HAS_BALANCE:
        factor = tl.load(balance + r * KEY_DIM + d, mask=d < KEY_DIM, other=0.0)
        q_tile = q_tile.to(tl.float32) * factor[None, :]
    q_tile = q_tile.to(DOT)
    if HAS_ROPE:
        partner = tl.load(turns + d, mask=d < KEY_DIM, other=-1)
        pair = tl.load(turns + KEY_DIM + d, mask=d < KEY_DIM, other=0)
        sign = tl.load(turns + 2 * KEY_DIM + d, mask=d < KEY_DIM, other=0).to(tl.float32)
        turns_mask = (g < GROUP)[:, None] & (partner >= 0)[None, :]
        exchanged = tl.load(q + s * q_s + head[:, None] * q_h + partner[None, :], mask=turns_mask, other=0.0)
        exchanged = (exchanged.to(tl.float32) * sign[None, :]).to(DOT)
    fixed = (r % HEADS) * KEY_DIM
    top = tl.full([GROUP_BLOCK], -INF, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    table_row = table + r * table_stride
    logit_rows = logits + (r * GROUP + g) * (n_splits * SPLIT) + first_split * SPLIT
    for first in range(begin, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        ok = slot < n
        at = tile_rows(bases, n_arenas, POSITIONS, table_row, first, slot, ok, LOG_SLOTS, LOG_PAGES, BLOCK, 1, tl.int32)
        position = tl.load(at, mask=ok, other=-1)
        visible = position >= 0
        if HAS_WINDOW:
            visible = visible & (here - position < window)
        number = tl.load(table_row + (first >> LOG_SLOTS))
        base = tl.load(bases + KEYS * n_arenas + (number >> LOG_PAGES))
        page = base.to(tl.pointer_type(tl.uint8)) + (number & ((1 << LOG_PAGES) - 1)).to(tl.int64) * PAGE_BYTES
        inside = (slot & (SLOTS - 1))[:, None]
        k = numbers_at(
            page,
            inside // LANES,
            inside % LANES,
            d[None, :],
            inside,
            d[None, :],
            ok[:, None] & (d < KEY_DIM)[None, :],
            key_numbers,
            key_scales + fixed,
            key_zeros + fixed,
            K_FORMAT,
            K_BITS,
            K_CODES,
            K_TOP,
            K_SCALES,
            K_ZEROS,
            K_GROUP,
            K_BY_CHANNEL,
            K_FIXED,
            KEY_DIM,
            SLOTS,
            KEY_DIM,
            K_MEANS,
        )  # (BLOCK, K)
        v = numbers_at(
            page,
            e[None, :] // LANES,
            e[None, :] % LANES,
            inside,
            inside,
            e[None, :],
            ok[:, None] & (e < VALUE_DIM)[None, :],
            value_numbers,
            key_scales,
            key_zeros,
            V_FORMAT,
            V_BITS,
            V_CODES,
            V_TOP,
            V_SCALES,
            V_ZEROS,
            V_GROUP,
            V_BY_CHANNEL,
            V_FIXED,
            VALUE_DIM,
            SLOTS,
            SLOTS,
            V_MEANS,
        )  # (BLOCK, V)
        if K_N_EXTRA > 0:
            k += beside_at(page, slot & (SLOTS - 1), d, K_EXTRA, K_N_EXTRA, KEY_BLOCK, BLOCK)
        if V_N_EXTRA > 0:
            v += beside_at(page, slot & (SLOTS - 1), e, V_EXTRA, V_N_EXTRA, VALUE_BLOCK, BLOCK)
        if HAS_ROPE:
            at_turn = tl.maximum(position, 0).to(tl.int64)[:, None] * n_turns + pair[None, :]
            turning = ok[:, None] & (partner >= 0)[None, :]
            across = k * tl.load(turn_sin + at_turn, mask=turning, other=0.0)
            k = k * tl.load(turn_cos + at_turn, mask=turning, other=1.0)
        product = tl.dot(q_tile, tl.trans(k.to(DOT)), input_precision="ieee")
        if HAS_ROPE:
            product += tl.dot(exchanged, tl.trans(across.to(DOT)), input_precision="ieee")
        x = logit2(product, scale, softcap, HAS_CAP)
        if HAS_MASSES:
            at = tile_rows(
                bases, n_arenas, LOG_MASSES, table_row, first, slot, ok, LOG_SLOTS, LOG_PAGES, BLOCK, 1, tl.float32
            )
            x += (tl.load(at, mask=ok, other=0.0) * LOG2_E)[None, :]
        x = tl.where(visible[None, :], x, -INF)
        if KEEP_LOGITS:
            tl.store(logit_rows[:, None] + slot[None, :], x, mask=(g < GROUP)[:, None] & ok[None, :])
        top, total, acc = take_in(x, v, top, total, acc, DOT)
    to = (r * n_splits + first_split + split) * GROUP + g
    store_part(part_out, part_max, part_sum, to, g, e, top, total, acc, GROUP, VALUE_DIM)


class PlainPart(NamedTuple):
    """The plain part of regions, for the kernel that attends to both."""

    where: tuple[Any, ...]  #: bases, for how many arenas they have room, table and its stride, lengths and their copy
    n_splits: int
    constants: dict[str, Any]


def attend_codes(
    packed: PackedRegions,
    q: Tensor,
    where: tuple[Any, ...],
    q_pos: Tensor,
    outputs: tuple[Any, ...],
    settings: tuple[float, float, int],
    flags: dict[str, Any],
    dot: tl.dtype,
    grid: tuple[int, int],
    plain: PlainPart | None = None,
) -> None:
    """Launch `attend_words` where it serves, else `attend_packed`.

    Where a plain part is given, it is `attend_both`. outputs are the partial results, the logits, all splits, and the
    first of these.
    """
    pages, layout = packed.pages, packed.pages.layout
    flags = {
        **flags,
        "KEY_DIM": layout.key_dim,
        "KEY_BLOCK": block_of(layout.key_dim),
        "PAGE_BYTES": layout.page_bytes,
        "DOT": dot,
        "HAS_CHANNELS": packed.channels is not None,
        "HAS_BALANCE": packed.balance is not None,
        "HAS_MASSES": pages.masses,
        **side_constants("K", layout.key, layout.key_offsets, layout.key_dim),
        **side_constants("V", layout.value, layout.value_offsets, layout.value_dim),
        **page_logs(pages),
    }
    first = (q, *q.stride()[:2], *where, packed.lens, q_pos, *outputs)
    kept = tuple(q if x is None else rows_of(x) for x in (packed.channels, packed.balance))
    if words_serve(packed, flags["GROUP"], dot):
        flags.update(word_shapes(layout, flags["GROUP"], flags["SPLIT"]))
        before, beside = 0, tuple[Any, ...]()
        if plain is not None:
            before, beside = plain.n_splits, plain.where
            flags.update(plain.constants)
        kernel = attend_words if plain is None else attend_both
        taken = {name: value for name, value in flags.items() if name in kernel.arg_names}
        both = (grid[0], before + grid[1])
        kernel[both](
            *beside, *first, before, *kept, *settings, TWO_128, **taken, **word_launch(layout, plain is not None)
        )
        return
    assert plain is None, "only words are read beside plain pages"
    numbers = [numbers_on(side, q.device) if side.format.uses_table else q for side in (layout.key, layout.value)]
    fixed = tuple(q if x is None else rows_of(x) for x in (packed.key_scales, packed.key_zeros))
    rope = packed.rope
    turning = (q, q, q, 0) if rope is None else (rope.by_channel, rope.cos, rope.sin, rope.cos.shape[1])
    # wide heads and float32 products take more registers than four warps have
    wide = max(layout.key_dim, layout.value_dim) > 128 or dot == tl.float32
    attend_packed[grid](
        *first,
        *numbers,
        *fixed,
        *kept,
        *turning,
        *settings,
        **flags,
        BLOCK=RUN,
        HAS_ROPE=rope is not None,
        num_warps=8 if wide else 4,
        num_stages=2,
    )
