# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The best entries of each region, counts of heads that compete, and the move of entries to other pages.

Values are compared as integers in the order of the floats. A program finds the lowest of the entries that stay four
bits at a time, from the highest: it counts how many of those with the bits so far have each of the 16 next digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.gpu.common import (
    KEYS,
    LOG_MASSES,
    POSITIONS,
    SCORES,
    TYPES,
    VALUES,
    block_of,
    check,
    locate,
    on_its_device,
    page_logs,
    rows_of,
    slot_rows,
)
from millpond.kernels.selection_args import Best, BestArgs, MoveArgs, ShareArgs

SELECT_BLOCK = 512  #: columns that a program looks at together
MOVE_BLOCK = 32  #: slots that a program moves together
SELECT_WARPS = 8
DIGITS = tl.constexpr(16)
HIGHEST = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _order_of(value, spans, n_spans, column):
    """Return numbers (uint32) that order entries by value, pinned ones above all."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = (signed ^ -0x80000000).to(tl.uint32, bitcast=True)
    for span in range(n_spans):
        begin = tl.load(spans + 2 * span)
        end = tl.load(spans + 2 * span + 1)
        order = tl.where((column >= begin) & (column < end), tl.full(order.shape, HIGHEST, tl.uint32), order)
    return order


@triton.jit
def _digits(row, spans, n_spans, n, prefix, known, shift, BLOCK: tl.constexpr):
    """Return how many entries that begin with `prefix` have each next digit, (16,)."""
    digit = tl.arange(0, DIGITS)
    found = tl.zeros([DIGITS], tl.int32)
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        ok = column < n
        order = _order_of(tl.load(row + column, mask=ok, other=0.0), spans, n_spans, column)
        own = ((order >> shift) & 15).to(tl.int32)
        here = ok & ((order & known) == prefix)
        found += tl.sum((here[:, None] & (own[:, None] == digit[None, :])).to(tl.int32), 0)
    return found


@triton.jit(do_not_specialize=["n", "n_spans", "width"])
def select(value, value_r, spans, n_spans, counts, columns, is_nan, n, width, BLOCK: tl.constexpr):
    """Write the columns of the entries of a region that stay, ascending."""
    r = tl.program_id(0).to(tl.int64)
    row, own_spans = value + r * value_r, spans + r * n_spans * 2
    count = tl.load(counts + r)
    digit = tl.arange(0, DIGITS)
    prefix = tl.full([1], 0, tl.uint32)
    known = tl.full([1], 0, tl.uint32)
    above = 0
    equal = 0
    for step in range(8):
        shift = 28 - 4 * step
        found = _digits(row, own_spans, n_spans, n, prefix, known, shift, BLOCK)
        at_least = above + tl.sum(found, 0) - tl.cumsum(found, 0) + found
        chosen = tl.max(tl.where(at_least >= count, digit, 0), 0)
        above += tl.sum(tl.where(digit > chosen, found, 0), 0)
        equal = tl.sum(tl.where(digit == chosen, found, 0), 0)
        prefix = prefix | (chosen.to(tl.uint32) << shift)
        known = known | (tl.full([1], 15, tl.uint32) << shift)
    leave = equal - (count - above)  # of those as low as the lowest, the oldest
    n_equal = 0
    n_kept = 0
    n_nan = 0
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        ok = column < n
        number = tl.load(row + column, mask=ok, other=0.0)
        order = _order_of(number, own_spans, n_spans, column)
        is_equal = ok & (order == prefix)
        rank = n_equal + tl.cumsum(is_equal.to(tl.int32), 0)
        stays = ok & ((order > prefix) | (is_equal & (rank > leave)))
        place = n_kept + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(columns + r * width + place, column, mask=stays)
        n_equal += tl.sum(is_equal.to(tl.int32), 0)
        n_kept += tl.sum(stays.to(tl.int32), 0)
        n_nan += tl.sum((number != number).to(tl.int32), 0)
    tl.store(is_nan + r, n_nan > 0)


@triton.jit(do_not_specialize=["n", "n_spans", "n_heads"])
def share(
    value, value_l, value_h, spans, n_spans, least, total, counts, n, n_heads, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write how many entries each head of a layer keeps."""
    layer = tl.program_id(0).to(tl.int64)
    heads, digit = tl.arange(0, HEADS), tl.arange(0, DIGITS)
    inside = heads < n_heads
    floor = tl.where(inside, tl.load(least + layer), 0)
    wanted = tl.load(total + layer)
    prefix = tl.full([1], 0, tl.uint32)
    known = tl.full([1], 0, tl.uint32)
    above = tl.zeros([HEADS], tl.int32)
    equal = tl.zeros([HEADS], tl.int32)
    for step in range(8):
        shift = 28 - 4 * step
        found = tl.zeros([HEADS, DIGITS], tl.int32)
        for head in range(n_heads):
            row, own_spans = value + layer * value_l + head * value_h, spans + (layer * n_heads + head) * n_spans * 2
            own = _digits(row, own_spans, n_spans, n, prefix, known, shift, BLOCK)
            found = tl.where(heads[:, None] == head, own[None, :], found)
        at_least = above[:, None] + tl.sum(found, 1)[:, None] - tl.cumsum(found, 1) + found
        kept = tl.sum(tl.maximum(at_least, floor[:, None]), 0)
        chosen = tl.max(tl.where(kept >= wanted, digit, 0), 0)
        above += tl.sum(tl.where(digit[None, :] > chosen, found, 0), 1)
        equal = tl.sum(tl.where(digit[None, :] == chosen, found, 0), 1)
        prefix = prefix | (chosen.to(tl.uint32) << shift)
        known = known | (tl.full([1], 15, tl.uint32) << shift)
    sure = tl.maximum(above, floor)
    more = tl.maximum(above + equal, floor) - sure  # as low as the lowest: the first heads keep theirs
    left = wanted - tl.sum(sure, 0) - (tl.cumsum(more, 0) - more)
    tl.store(counts + layer * n_heads + heads, sure + tl.minimum(tl.maximum(left, 0), more), mask=inside)


@triton.jit
def _move_rows(source, target, ok, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows of source (row pointers), with the places of their numbers in target."""
    lane = tl.arange(0, WIDTH)
    both = ok[:, None] & (lane < DIM)[None, :]
    return tl.load(source[:, None] + lane[None, :], mask=both, other=0), target[:, None] + lane[None, :], both


@triton.jit(do_not_specialize=["n_arenas", "to_arenas", "width"])
def move(
    bases,
    n_arenas,
    table,
    table_r,
    to_bases,
    to_arenas,
    to_table,
    to_table_r,
    columns,
    counts,
    scores,
    scores_r,
    width,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
    TO_TYPE: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TO_LOG_SLOTS: tl.constexpr,
    TO_LOG_PAGES: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Move entries of a region to its first slots, in pages that may be the same.

    An entry moves to a slot that is not behind its own. So where the pages are the same (`ALONE`) one program moves all
    of a region, in order: what it has yet to read lies behind all that it writes.
    """
    r = tl.program_id(0).to(tl.int64)
    n = tl.load(counts + r)
    begin = 0 if ALONE else tl.program_id(1) * BLOCK
    end = n if ALONE else tl.minimum(n, begin + BLOCK)
    for first in range(begin, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        ok = slot < n
        column = tl.load(columns + r * width + slot, mask=ok, other=0)
        arena, place = locate(table + r * table_r, column, ok, LOG_SLOTS, LOG_PAGES)
        to_arena, to_place = locate(to_table + r * to_table_r, slot, ok, TO_LOG_SLOTS, TO_LOG_PAGES)
        at = slot_rows(bases, n_arenas, KEYS, arena, place, ok, KEY_DIM, TYPE)
        to = slot_rows(to_bases, to_arenas, KEYS, to_arena, to_place, ok, KEY_DIM, TO_TYPE)
        keys, to_keys, has_key = _move_rows(at, to, ok, KEY_DIM, KEY_BLOCK)
        at = slot_rows(bases, n_arenas, VALUES, arena, place, ok, VALUE_DIM, TYPE)
        to = slot_rows(to_bases, to_arenas, VALUES, to_arena, to_place, ok, VALUE_DIM, TO_TYPE)
        values, to_values, has_value = _move_rows(at, to, ok, VALUE_DIM, VALUE_BLOCK)
        position = tl.load(slot_rows(bases, n_arenas, POSITIONS, arena, place, ok, 1, tl.int32), mask=ok, other=-1)
        if HAS_SCORES:
            score = tl.load(scores + r * scores_r + column, mask=ok, other=0.0)
        else:
            score = tl.load(slot_rows(bases, n_arenas, SCORES, arena, place, ok, 1, tl.float32), mask=ok, other=0.0)
        if HAS_MASSES:
            mass = tl.load(slot_rows(bases, n_arenas, LOG_MASSES, arena, place, ok, 1, tl.float32), mask=ok, other=0.0)
        if ALONE:
            tl.debug_barrier()
        tl.store(to_keys, keys.to(TO_TYPE), mask=has_key)
        tl.store(to_values, values.to(TO_TYPE), mask=has_value)
        tl.store(slot_rows(to_bases, to_arenas, POSITIONS, to_arena, to_place, ok, 1, tl.int32), position, mask=ok)
        tl.store(slot_rows(to_bases, to_arenas, SCORES, to_arena, to_place, ok, 1, tl.float32), score, mask=ok)
        if HAS_MASSES:
            tl.store(slot_rows(to_bases, to_arenas, LOG_MASSES, to_arena, to_place, ok, 1, tl.float32), mass, mask=ok)


@on_its_device
def best_columns(args: BestArgs) -> Best:
    check(args.device, args.value.dtype)
    value, pinned = rows_of(args.value), args.pinned.contiguous()
    columns = torch.empty(len(value), args.width, dtype=torch.int32, device=value.device)
    is_nan = torch.empty(len(value), dtype=torch.bool, device=value.device)
    select[(len(value),)](
        value,
        value.stride(0),
        pinned,
        pinned.shape[1],
        args.counts,
        columns,
        is_nan,
        value.shape[1],
        args.width,
        BLOCK=SELECT_BLOCK,
        num_warps=SELECT_WARPS,
    )
    return Best(columns, is_nan)


@on_its_device
def shared_counts(args: ShareArgs) -> Tensor:
    check(args.device, args.value.dtype)
    value, pinned = rows_of(args.value), args.pinned.contiguous()
    n_layers, n_heads, n = value.shape
    counts = torch.empty(n_layers, n_heads, dtype=torch.int32, device=value.device)
    share[(n_layers,)](
        value,
        *value.stride()[:2],
        pinned,
        pinned.shape[1],
        args.least,
        args.total,
        counts,
        n,
        n_heads,
        HEADS=triton.next_power_of_2(n_heads),
        BLOCK=SELECT_BLOCK,
        num_warps=SELECT_WARPS,
    )
    return counts


@on_its_device
def move_entries(args: MoveArgs) -> None:
    source, target, columns = args.source, args.target, args.columns.contiguous()
    pages, to_pages = source.pages, target.pages
    scores = None if args.scores is None else rows_of(args.scores)
    check(args.device, pages.dtype, to_pages.dtype)
    n, width = columns.shape
    if not n or not width:
        return
    table, to_table = rows_of(source.table), rows_of(target.table)
    alone = args.in_place
    to_logs = {f"TO_{name}": log for name, log in page_logs(to_pages).items()}
    move[(n, 1 if alone else triton.cdiv(width, MOVE_BLOCK))](
        pages.bases,
        pages.bases.shape[1],
        table,
        table.stride(0),
        to_pages.bases,
        to_pages.bases.shape[1],
        to_table,
        to_table.stride(0),
        columns,
        args.counts,
        columns if scores is None else scores,
        0 if scores is None else scores.stride(0),
        width,
        KEY_DIM=pages.key_dim,
        VALUE_DIM=pages.value_dim,
        KEY_BLOCK=block_of(pages.key_dim),
        VALUE_BLOCK=block_of(pages.value_dim),
        TYPE=TYPES[pages.dtype],
        TO_TYPE=TYPES[to_pages.dtype],
        HAS_MASSES=pages.masses and to_pages.masses,
        HAS_SCORES=scores is not None,
        BLOCK=MOVE_BLOCK,
        ALONE=alone,
        **page_logs(pages),
        **to_logs,
    )
