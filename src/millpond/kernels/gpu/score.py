# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Accumulators of entries with what they received in a step, and the lowest value of each chunk of slots."""

from __future__ import annotations

import triton
import triton.language as tl

from millpond.kernels.decode_rules import Evict, Signal
from millpond.kernels.gpu.common import INF, LOG2_E, POSITIONS, REDUCE_MAX, REDUCE_MEAN, SCORES, locate, slot_rows

NONE = tl.constexpr(int(Signal.NONE))
SUM = tl.constexpr(int(Signal.SUM))
NEVER = tl.constexpr(int(Evict.NEVER))
ACC_MEAN = tl.constexpr(int(Evict.ACC_MEAN))
OLDEST = tl.constexpr(int(Evict.OLDEST))
RANDOM = tl.constexpr(int(Evict.RANDOM))
HEAVIEST = tl.constexpr(int(Evict.HEAVIEST))
SPACED = tl.constexpr(int(Evict.SPACED))

LAST_INT = tl.constexpr(2**31 - 1)
IN_PACKED = tl.constexpr(2**30)  # marks the slot of a victim in packed pages


@triton.jit
def hash_priority(position, head, seed):
    """Return `decode_rules.hash_priority`: 32-bit wrapping arithmetic, then the upper 24 bits."""
    x = tl.mul(position.to(tl.uint32), 0x9E3779B1, sanitize_overflow=False)
    x = tl.add(x, tl.mul(head.to(tl.uint32), 0x85EBCA77, sanitize_overflow=False), sanitize_overflow=False)
    x = tl.add(x, seed.to(tl.uint32), sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 16), 0x7FEB352D, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return ((x ^ (x >> 16)) >> 8).to(tl.float32)


@triton.jit
def ranked(value, position, here, recent, sinks, window, HAS_WINDOW: tl.constexpr):
    """Return the value with +inf for protected entries and -inf for those hidden later."""
    value = tl.where((position < sinks) | (here - position < recent), INF, value)
    if HAS_WINDOW:
        value = tl.where(here + 1 - position >= window, -INF, value)
    return value


@triton.jit
def spaced_value(position, WIDTH: tl.constexpr, SHIFT: tl.constexpr, STRIDE: tl.constexpr):
    """Return the worth of a position in a pattern.

    It is 1 or 0 by the stride, or the power of two in the number of its unit.
    """
    unit = tl.maximum(position, 0) // WIDTH + SHIFT
    if STRIDE:
        return (unit % STRIDE == 0).to(tl.float32)
    return tl.where(unit == 0, 2147483648.0, (unit & -unit).to(tl.float32))


@triton.jit
def plain_value(
    scores,
    position,
    here,
    head,
    seed,
    EVICT: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Return the value of entries before protection, from accumulators or positions."""
    if EVICT == OLDEST:
        return position.to(tl.float32)
    elif EVICT == RANDOM:
        return hash_priority(position, head, seed)
    elif EVICT == HEAVIEST:
        return -scores
    elif EVICT == SPACED:
        return spaced_value(position, WIDTH, SHIFT, STRIDE)
    elif EVICT == ACC_MEAN:
        return tl.div_rn(scores, tl.maximum(here - position + 1, 1).to(tl.float32))
    else:
        return scores


@triton.jit
def region_scores(
    bases, n_arenas, table, table_stride, lens, r, slot, LOG_SLOTS: tl.constexpr, LOG_PAGES: tl.constexpr
):
    """Return the accumulators in the slots of region r, 0 past its length."""
    ok = slot < tl.load(lens + r)
    arena, row = locate(table + r * table_stride, slot, ok, LOG_SLOTS, LOG_PAGES)
    return tl.load(slot_rows(bases, n_arenas, SCORES, arena, row, ok, 1, tl.float32), mask=ok, other=0.0)


@triton.jit
def update_chunk(
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    r,
    first,
    n,
    here,
    full,
    recent,
    logits,
    width,
    lse,
    decay,
    sinks,
    window,
    seed,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    SIGNAL: tl.constexpr,
    REDUCE: tl.constexpr,
    EVICT: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    HASH_HEADS: tl.constexpr,
    UPDATE: tl.constexpr,
    CHOOSE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """UPDATE the accumulators of the chunk of region r from slot `first` on, of n slots.

    Returns value, position and slot of its lowest entry if it should CHOOSE one and the region is `full`.
    """
    slot = first + tl.arange(0, CHUNK)
    ok = slot < n
    arena, row = locate(table + r * table_stride, slot, ok, LOG_SLOTS, LOG_PAGES)
    score_at = slot_rows(bases, n_arenas, SCORES, arena, row, ok, 1, tl.float32)
    scores = tl.zeros([CHUNK], tl.float32)
    if UPDATE:
        for g in tl.static_range(GROUP):
            x = tl.load(logits + (r * GROUP + g) * width + slot, mask=ok, other=-INF)
            p = tl.exp2(x - tl.load(lse + r * GROUP + g) * LOG2_E)
            if REDUCE == REDUCE_MAX:
                scores = tl.maximum(scores, p)
            else:
                scores += p
        if REDUCE == REDUCE_MEAN:
            scores = scores * (1.0 / GROUP)
        if SIGNAL == SUM:
            scores = decay * tl.load(score_at, mask=ok, other=0.0) + scores
        tl.store(score_at, scores, mask=ok)
    least = tl.full([], INF, tl.float32)
    oldest = tl.full([], LAST_INT, tl.int32)
    lowest = tl.full([], LAST_INT, tl.int32)
    if CHOOSE:  # noqa: SIM102 - known at compile time, unlike `full`
        if full:
            position_at = slot_rows(bases, n_arenas, POSITIONS, arena, row, ok, 1, tl.int32)
            position = tl.load(position_at, mask=ok, other=-1)
            if SHARED:
                s = r // HEADS
                for h in range(HEADS):
                    theirs = region_scores(
                        bases, n_arenas, table, table_stride, lens, s * HEADS + h, slot, LOG_SLOTS, LOG_PAGES
                    )
                    scores += plain_value(theirs, position, here, h, seed, EVICT, WIDTH, SHIFT, STRIDE)
                value = scores * (1.0 / HEADS)
            else:
                if not UPDATE:
                    scores = tl.load(score_at, mask=ok, other=0.0)
                value = plain_value(scores, position, here, r % HASH_HEADS, seed, EVICT, WIDTH, SHIFT, STRIDE)
            value = ranked(value, position, here, tl.load(recent + r), sinks, window, HAS_WINDOW)
            held = position >= 0
            least = tl.min(tl.where(held, value, INF), 0)
            tied = held & (value == least)
            oldest = tl.min(tl.where(tied, position, LAST_INT), 0)
            lowest = tl.min(tl.where(tied & (position == oldest), slot, LAST_INT), 0)
    return least, oldest, lowest


@triton.jit(do_not_specialize=["n_arenas", "width", "n_chunks", "sinks", "window", "seed"])
def score(
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    others,
    caps,
    recent,
    q_pos,
    logits,
    width,
    lse,
    lowest_value,
    lowest_position,
    lowest_slot,
    n_chunks,
    decay,
    sinks,
    window,
    seed,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    SIGNAL: tl.constexpr,
    REDUCE: tl.constexpr,
    EVICT: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    HASH_HEADS: tl.constexpr,
    UPDATE: tl.constexpr,
    CHOOSE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Run `update_chunk` for one chunk.

    Where the region has a PACKED part, `others` are the lengths of the part that this one is not, and `settle` reads
    every chunk, empty ones too.
    """
    r = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    here = tl.load(q_pos + r // HEADS)
    n = tl.load(lens + r)
    if here < 0:
        return
    if chunk * CHUNK >= n:
        if PACKED and CHOOSE:
            tl.store(lowest_value + r * n_chunks + chunk, INF)
            tl.store(lowest_position + r * n_chunks + chunk, LAST_INT)
            tl.store(lowest_slot + r * n_chunks + chunk, LAST_INT)
        return
    stored = n
    if PACKED:  # with tombstones, which `settle` does not count: a chunk too many is no mistake
        stored += tl.load(others + r)
    least, oldest, lowest = update_chunk(
        bases,
        n_arenas,
        table,
        table_stride,
        lens,
        r,
        chunk * CHUNK,
        n,
        here,
        stored >= tl.load(caps + r),
        recent,
        logits,
        width,
        lse,
        decay,
        sinks,
        window,
        seed,
        HEADS,
        GROUP,
        LOG_SLOTS,
        LOG_PAGES,
        CHUNK,
        SIGNAL,
        REDUCE,
        EVICT,
        SHARED,
        WIDTH,
        SHIFT,
        STRIDE,
        HASH_HEADS,
        UPDATE,
        CHOOSE,
        HAS_WINDOW,
    )
    if CHOOSE:
        tl.store(lowest_value + r * n_chunks + chunk, least)
        tl.store(lowest_position + r * n_chunks + chunk, oldest)
        tl.store(lowest_slot + r * n_chunks + chunk, lowest)
