# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Encoding of entries into packed pages: two launches, one per side, bit for bit as in plain torch.

A program takes the slots of a page that share a scale, or 32 of them, and reads its numbers twice: for their range, and
for their codes. Products and sums are not fused, and quotients are rounded to nearest, as everywhere else.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.errors import NumericsError
from millpond.kernels.args import EntryRows
from millpond.kernels.eager import packed_pages
from millpond.kernels.gpu.common import (
    KEYS,
    LOG_MASSES,
    POSITIONS,
    SCORES,
    TYPES,
    block_of,
    check,
    on_its_device,
    page_logs,
    rows_of,
    slot_rows,
)
from millpond.kernels.gpu.entry_codes import BLOCK, LARGEST_E4M3, bfloat16_of, code_of, factors, numbers_of, put_codes
from millpond.kernels.gpu.packed import FIRST_TABLE, FP8, ROWS, side_constants
from millpond.kernels.packed.groups import MAX_F16, NOT_FINITE, TOO_LARGE
from millpond.kernels.packed.layout import RUN, Format, PackedLayout, Side, cuts_of
from millpond.kernels.packed.regions import PackedRegions

UNROLLED = tl.constexpr(8)
LARGEST = tl.constexpr(MAX_F16)
INFINITE = tl.constexpr(float("inf"))
HAS_NAN, HAS_LARGE = tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["n_arenas", "width", "n_turns"])
def encode(
    bases,
    n_arenas,
    table,
    table_stride,
    start,
    count,
    index,
    width,
    source,
    source_r,
    source_n,
    positions,
    positions_r,
    positions_n,
    scores,
    scores_r,
    scores_n,
    masses,
    masses_r,
    masses_n,
    cuts,
    fixed_scales,
    fixed_zeros,
    kept,
    balance,
    turns,
    turn_cos,
    turn_sin,
    n_turns,
    refused,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    N_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    UNIT: tl.constexpr,
    IS_KEY: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    TOP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FIXED: tl.constexpr,
    MEANS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,
    HAS_BALANCE: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    KEEPS_MASSES: tl.constexpr,
    HAS_MASSES: tl.constexpr,
):
    """Encode one side of UNIT slots of a region; positions and scores go with the keys.

    So do masses. The channels of a slot are N_GROUPS groups, of which a tile has room for GROUPS of MEMBERS each. Bits
    of `refused` say that a number is none that codes can hold.
    """
    SLOTS: tl.constexpr = 1 << LOG_SLOTS
    SYMMETRIC: tl.constexpr = ZEROS < 0 and not FIXED and FORMAT < FIRST_TABLE
    PER_GROUP: tl.constexpr = DIM // N_GROUPS
    r = tl.program_id(0).to(tl.int64)
    n = tl.load(count + r)
    begin = tl.load(start + r)
    unit = (begin // UNIT + tl.program_id(1)) * UNIT
    if (n <= 0) | (unit >= begin + n):
        return
    number = tl.load(table + r * table_stride + (unit >> LOG_SLOTS))
    base = tl.load(bases + KEYS * n_arenas + (number >> LOG_PAGES))
    page = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)
    page += (number & ((1 << LOG_PAGES) - 1)).to(tl.int64) * PAGE_BYTES
    member = tl.arange(0, MEMBERS)
    group = tl.arange(0, GROUPS)
    channel = group[:, None] * PER_GROUP + member[None, :]
    is_member = (member < PER_GROUP)[None, :]
    inside = (group < N_GROUPS)[:, None] & is_member
    source += r * source_r
    positions += r * positions_r
    index += r * width
    kept += r * DIM
    balance += r * DIM
    total = tl.zeros([GROUPS, MEMBERS], tl.float32)
    if MEANS >= 0:  # slot after slot, as everywhere
        for first in range(0, SLOTS, UNROLLED):
            for own in tl.static_range(UNROLLED):
                column = unit + first + own + tl.arange(0, 1) - begin
                ok = (column < n) & (column < width)
                row = tl.load(index + column, mask=ok, other=0).to(tl.int64)
                x = numbers_of(
                    source,
                    source_n,
                    row,
                    ok,
                    channel,
                    inside,
                    row,
                    kept,
                    balance,
                    turns,
                    turn_cos,
                    turn_sin,
                    n_turns,
                    DIM,
                    HAS_CHANNELS,
                    HAS_BALANCE,
                    False,
                )
                total += tl.sum(x, 0)
        total = total * (1.0 / SLOTS)
    mean = total.to(tl.float16).to(tl.float32)
    low = tl.full([GROUPS, MEMBERS], INFINITE, tl.float32)
    high = tl.full([GROUPS, MEMBERS], -INFINITE, tl.float32)
    large = tl.abs(mean) > LARGEST
    finite = tl.full([GROUPS, MEMBERS], 1, tl.int32) > 0
    if (BY_CHANNEL and not FIXED and FORMAT != ROWS) or FORMAT == FP8:
        for first in range(0, UNIT, BLOCK):
            column = unit + first + tl.arange(0, BLOCK) - begin
            ok = (column >= 0) & (column < n) & (column < width)
            row = tl.load(index + column, mask=ok, other=0).to(tl.int64)
            position = tl.load(positions + row * positions_n, mask=ok, other=0)
            x = numbers_of(
                source,
                source_n,
                row,
                ok,
                channel,
                inside,
                position,
                kept,
                balance,
                turns,
                turn_cos,
                turn_sin,
                n_turns,
                DIM,
                HAS_CHANNELS,
                HAS_BALANCE,
                HAS_ROPE,
            )
            if FORMAT == FP8:
                x = tl.abs(x)
            low = tl.minimum(low, tl.min(x, 0))
            high = tl.maximum(high, tl.max(x, 0))
    channel_scale = low
    channel_zero = low
    if FIXED:
        at = (r % HEADS) * DIM + channel
        channel_scale = tl.load(fixed_scales + at, mask=inside, other=0.0)
        channel_zero = tl.load(fixed_zeros + at, mask=inside, other=0.0)
    elif FORMAT == FP8:
        most = tl.max(tl.max(high, 1), 0) + tl.zeros([GROUPS, MEMBERS], tl.float32)
        channel_scale = tl.div_rn(most, tl.full([GROUPS, MEMBERS], LARGEST_E4M3, tl.float32))
        at = (page + SCALES).to(tl.pointer_type(tl.float32)) + channel
        tl.store(at, channel_scale, mask=channel == 0)
    elif BY_CHANNEL and FORMAT != ROWS:
        channel_scale, channel_zero = factors(low, high, FORMAT, BITS, SYMMETRIC)
        large = large | (tl.abs(channel_scale) > LARGEST) | (tl.abs(channel_zero) > LARGEST)
        half_scale, half_zero = channel_scale.to(tl.float16), channel_zero.to(tl.float16)
        at = (unit & (SLOTS - 1)) // GROUP * DIM + channel
        tl.store((page + SCALES).to(tl.pointer_type(tl.float16)) + at, half_scale, mask=inside)
        if ZEROS >= 0:
            tl.store((page + ZEROS).to(tl.pointer_type(tl.float16)) + at, half_zero, mask=inside)
        channel_scale, channel_zero = half_scale.to(tl.float32), half_zero.to(tl.float32)
    if MEANS >= 0:
        large = large | (tl.abs(total) > LARGEST)
        tl.store((page + MEANS).to(tl.pointer_type(tl.float16)) + channel, total.to(tl.float16), mask=inside)
    for first in range(0, UNIT, BLOCK):
        column = unit + first + tl.arange(0, BLOCK) - begin
        ok = (column >= 0) & (column < n) & (column < width)
        slot = (unit + first + tl.arange(0, BLOCK)) & (SLOTS - 1)
        row = tl.load(index + column, mask=ok, other=0).to(tl.int64)
        position = tl.load(positions + row * positions_n, mask=ok, other=0)
        x = numbers_of(
            source,
            source_n,
            row,
            ok,
            channel,
            inside,
            position,
            kept,
            balance,
            turns,
            turn_cos,
            turn_sin,
            n_turns,
            DIM,
            HAS_CHANNELS,
            HAS_BALANCE,
            HAS_ROPE,
        )
        stored = ok[:, None, None] & inside[None, :, :]
        if FORMAT == ROWS:
            at = (page + CODES).to(tl.pointer_type(tl.int16)) + slot[:, None, None] * DIM + channel[None, :, :]
            tl.store(at, bfloat16_of(x), mask=stored)
        else:
            finite = finite & (tl.min((tl.abs(x) < INFINITE).to(tl.int32), 0) > 0)
            x = tl.where(x == 0, 0.0, x)  # zeros lose their signs: equal numbers have equal codes
            if MEANS >= 0:
                x = x - mean[None, :, :]
            if FIXED or BY_CHANNEL or FORMAT == FP8:
                code = code_of(x, channel_scale[None, :, :], channel_zero[None, :, :], cuts, FORMAT, BITS, SYMMETRIC)
            else:
                least = tl.min(tl.where(is_member[None, :, :], x, INFINITE), 2)
                most = tl.max(tl.where(is_member[None, :, :], x, -INFINITE), 2)
                scale, zero = factors(least, most, FORMAT, BITS, SYMMETRIC)  # (BLOCK, GROUPS)
                beyond = (tl.abs(scale) > LARGEST) | (tl.abs(zero) > LARGEST)
                large = large | (tl.max(beyond.to(tl.int32), 0) > 0)[:, None]
                half_scale, half_zero = scale.to(tl.float16), zero.to(tl.float16)
                at = group[None, :] * SLOTS + slot[:, None]
                held = ok[:, None] & (group < N_GROUPS)[None, :]
                tl.store((page + SCALES).to(tl.pointer_type(tl.float16)) + at, half_scale, mask=held)
                if ZEROS >= 0:
                    tl.store((page + ZEROS).to(tl.pointer_type(tl.float16)) + at, half_zero, mask=held)
                scale, zero = half_scale.to(tl.float32)[:, :, None], half_zero.to(tl.float32)[:, :, None]
                code = code_of(x, scale, zero, cuts, FORMAT, BITS, SYMMETRIC)
            code = tl.where(stored, code, 0)
            if BITS == 3:
                put_codes(page, CODES, code & 3, slot, ok, channel, inside, IS_KEY, 2, DIM, SLOTS)
                put_codes(page, TOP, code >> 2, slot, ok, channel, inside, IS_KEY, 1, DIM, SLOTS)
            else:
                put_codes(page, CODES, code, slot, ok, channel, inside, IS_KEY, BITS, DIM, SLOTS)
        if IS_KEY:
            arena = tl.zeros_like(slot) + (number >> LOG_PAGES)
            place = ((number & ((1 << LOG_PAGES) - 1)).to(tl.int64) << LOG_SLOTS) + slot
            tl.store(slot_rows(bases, n_arenas, POSITIONS, arena, place, ok, 1, tl.int32), position, mask=ok)
            score = tl.zeros([BLOCK], tl.float32)
            if HAS_SCORES:
                score = tl.load(scores + r * scores_r + row * scores_n, mask=ok, other=0.0).to(tl.float32)
            tl.store(slot_rows(bases, n_arenas, SCORES, arena, place, ok, 1, tl.float32), score, mask=ok)
            if KEEPS_MASSES:
                mass = tl.zeros([BLOCK], tl.float32)
                if HAS_MASSES:
                    mass = tl.load(masses + r * masses_r + row * masses_n, mask=ok, other=0.0).to(tl.float32)
                tl.store(slot_rows(bases, n_arenas, LOG_MASSES, arena, place, ok, 1, tl.float32), mass, mask=ok)
    if FORMAT != ROWS:
        found = tl.where(finite, 0, HAS_NAN) | tl.where(large, HAS_LARGE, 0)
        not_finite = tl.max(tl.max(found & HAS_NAN, 1), 0)
        bits = not_finite | tl.max(tl.max(found & HAS_LARGE, 1), 0)
        tl.atomic_or(refused, bits, mask=bits > 0)


# ---------------------------------------------------------------------------------------------- launches


def kernel_serves(layout: PackedLayout) -> bool:
    """Return whether the kernel encodes pages of this layout: all without outliers."""
    return not layout.key.n_extra and not layout.value.n_extra


@cache
def cuts_on(side: Side, device: torch.device) -> Tensor:
    """Return the cuts between codes of a table, on a device, where they stay."""
    with torch.inference_mode(False):
        return cuts_of(side).to(device)


def _unit(side: Side, slots: int) -> int:
    """Return the slots that a program encodes: those that share a scale, or `BLOCK`."""
    if side.format is Format.FP8 or side.less_mean:
        return slots
    return side.group if side.by_channel and side.format.grouped and not side.fixed else RUN


def _n_units(rows: EntryRows, unit: int, grain: int) -> int:
    """Return the most units in which slots of a region lie."""
    if rows.on_host is None:
        return -(-rows.index.shape[1] // unit) + (grain % unit != 0)
    start, count = rows.on_host
    units = (start + count - 1) // unit - start // unit + 1
    return int(units[count > 0].max(initial=0))


@on_its_device
def _encode(table: Tensor, regions: PackedRegions, rows: EntryRows, is_key: bool, refused: Tensor) -> None:
    """Launch `encode` for the keys or the values."""
    pages, layout = regions.pages, regions.pages.layout
    side, dim = (layout.key, layout.key_dim) if is_key else (layout.value, layout.value_dim)
    at = layout.key_offsets if is_key else layout.value_offsets
    source = rows.keys if is_key else rows.values
    source = rows_of(source if source.dtype in TYPES else source.float())
    check(table.device, source.dtype)
    unit, index, positions = _unit(side, layout.slots), rows.index.contiguous(), rows.positions
    n_units = _n_units(rows, unit, layout.grain)
    if not n_units:
        return
    slotwise = side.format.grouped and not side.by_channel and not side.fixed
    n_groups = dim // side.group if slotwise and side.group else 1
    table = rows_of(table)
    scores, masses = (positions if t is None else t for t in (rows.scores, rows.log_masses))
    kept = regions.channels if is_key else regions.value_channels
    balance = regions.balance if is_key and regions.rope is None else None
    fixed = (regions.key_scales, regions.key_zeros) if is_key and side.fixed else (None, None)
    more = [source if t is None else t.contiguous() for t in (*fixed, kept, balance)]
    rope = regions.rope if is_key else None
    turning = (source, source, source, 0) if rope is None else (rope.by_channel, rope.cos, rope.sin, rope.cos.shape[1])
    constants = side_constants("S", side, at, dim)
    encode[(len(index), n_units)](
        pages.bases,
        pages.bases.shape[1],
        table,
        table.stride(0),
        rows.start.contiguous(),
        rows.count.contiguous(),
        index,
        index.shape[1],
        source,
        *source.stride()[:2],
        positions,
        *positions.stride(),
        scores,
        *scores.stride(),
        masses,
        *masses.stride(),
        cuts_on(side, table.device) if side.format.uses_table else source,
        *more,
        *turning,
        refused,
        HEADS=1 if fixed[0] is None else len(fixed[0]),
        DIM=dim,
        N_GROUPS=n_groups,
        GROUPS=1 << (n_groups - 1).bit_length(),
        MEMBERS=max(block_of(dim // n_groups), RUN),
        UNIT=unit,
        IS_KEY=is_key,
        PAGE_BYTES=layout.page_bytes,
        HAS_CHANNELS=kept is not None,
        HAS_BALANCE=balance is not None,
        HAS_ROPE=rope is not None,
        HAS_SCORES=rows.scores is not None,
        KEEPS_MASSES=pages.masses,
        HAS_MASSES=rows.log_masses is not None,
        **{name: constants[f"S_{name}"] for name in OF_A_SIDE},
        **page_logs(pages),
        num_warps=8 if dim > 128 else 4,
        enable_fp_fusion=False,  # each product is rounded, as by torch
    )


#: Constants of `side_constants` that `encode` takes.
OF_A_SIDE = ("FORMAT", "BITS", "CODES", "TOP", "SCALES", "ZEROS", "GROUP", "BY_CHANNEL", "FIXED", "MEANS")


def write_packed(regions: PackedRegions, rows: EntryRows) -> None:
    layout = regions.pages.layout
    if not kernel_serves(layout):
        packed_pages.write_packed(regions, rows)
        return
    if not rows.index.numel() or not regions.pages.codes:
        return
    refused = torch.zeros(1, dtype=torch.int32, device=regions.table.device)
    for is_key in (True, False):
        _encode(regions.table, regions, rows, is_key, refused)
    if layout.key.format is Format.ROWS and layout.value.format is Format.ROWS:
        return
    found = int(refused)
    if found:
        raise NumericsError(NOT_FINITE if found & HAS_NAN.value else TOO_LARGE)
