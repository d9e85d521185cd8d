# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Eviction and storage in a step: the lowest entry of a region leaves, the new one is stored."""

from __future__ import annotations

import triton
import triton.language as tl

from millpond.kernels.gpu.common import INF, LOG2_E, POSITIONS, REDUCE_MAX, REDUCE_MEAN, locate, slot_rows
from millpond.kernels.gpu.new_entry import store_entry
from millpond.kernels.gpu.score import IN_PACKED, LAST_INT, NEVER, NONE, plain_value, ranked, update_chunk

CHUNKS = tl.constexpr(64)  # chunk minima that `settle` loads at once


@triton.jit
def received_by_new(new_logits, lse, r, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, REDUCE: tl.constexpr):
    """Return the attention that the new entry of region r received, reduced by group."""
    g = tl.arange(0, GROUP_BLOCK)
    x = tl.load(new_logits + r * GROUP + g, mask=g < GROUP, other=-INF)
    p = tl.exp2(x - tl.load(lse + r * GROUP + g, mask=g < GROUP, other=0.0) * LOG2_E)
    if REDUCE == REDUCE_MAX:
        return tl.max(p, 0)
    elif REDUCE == REDUCE_MEAN:
        return tl.sum(p, 0) * (1.0 / GROUP)
    else:
        return tl.sum(p, 0)


@triton.jit
def lower(least, oldest, victim, value, position, slot):
    """Return the lower of two entries, of equal ones the older: value, position and slot."""
    better = (value < least) | ((value == least) & (position < oldest))
    return tl.where(better, value, least), tl.where(better, position, oldest), tl.where(better, slot, victim)


@triton.jit(
    do_not_specialize=[
        "n_arenas",
        "n_chunks",
        "sinks",
        "window",
        "seed",
        "packed_arenas",
        "first_packed",
        "width",
        "packed_slots",
    ]
)
def settle(
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    caps,
    recent,
    q_pos,
    k_new,
    k_s,
    k_h,
    v_new,
    v_s,
    v_h,
    new_logits,
    lse,
    lowest_value,
    lowest_position,
    lowest_slot,
    n_chunks,
    evicted,
    sinks,
    window,
    seed,
    packed_bases,
    packed_arenas,
    packed_table,
    packed_stride,
    packed_lens,
    dead,
    first_packed,
    logits,
    width,
    packed_slots,
    decay,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    SIGNAL: tl.constexpr,
    REDUCE: tl.constexpr,
    EVICT: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    HASH_HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    PACKED: tl.constexpr,
    PACKED_LOG_SLOTS: tl.constexpr,
    PACKED_LOG_PAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Append the new entry of a region, put it in the victim's slot, or let it be the victim.

    Where the region has a PACKED part, chunks from `first_packed` on are of it: a victim there leaves a tombstone, and
    the new entry is appended. If it takes the WHOLE region, it does what `score` does for all chunks first; the logits
    of the packed part are then `packed_slots` behind those of the other.
    """
    r = tl.program_id(0).to(tl.int64)
    s = r // HEADS
    h = r % HEADS
    here = tl.load(q_pos + s)
    if here < 0:
        tl.store(evicted + r, -1)
        return
    n = tl.load(lens + r)
    buried = 0
    packed_n = 0
    if PACKED:
        packed_n = tl.load(packed_lens + r)
        buried = tl.load(dead + r)
    new_score = 0.0
    if SIGNAL != NONE:
        new_score = received_by_new(new_logits, lse, r, GROUP, GROUP_BLOCK, REDUCE)
    slot = n
    stores = n >= 0
    grows = n >= 0
    gone = here * 0 - 1
    if EVICT != NEVER:
        grows = n + packed_n - buried < tl.load(caps + r)
    least = tl.full([], INF, tl.float32)
    oldest = tl.full([], LAST_INT, tl.int32)
    victim = tl.full([], 0, tl.int32)
    if WHOLE:
        for first in range(0, n, CHUNK):
            value, position, at = update_chunk(
                bases,
                n_arenas,
                table,
                table_stride,
                lens,
                r,
                first,
                n,
                here,
                grows == 0,
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
                False,
                WIDTH,
                SHIFT,
                STRIDE,
                HASH_HEADS,
                SIGNAL != NONE,
                EVICT != NEVER,
                HAS_WINDOW,
            )
            least, oldest, victim = lower(least, oldest, victim, value, position, at)
        if PACKED:
            for first in range(0, packed_n, CHUNK):
                value, position, at = update_chunk(
                    packed_bases,
                    packed_arenas,
                    packed_table,
                    packed_stride,
                    packed_lens,
                    r,
                    first,
                    packed_n,
                    here,
                    grows == 0,
                    recent,
                    logits + packed_slots,
                    width,
                    lse,
                    decay,
                    sinks,
                    window,
                    seed,
                    HEADS,
                    GROUP,
                    PACKED_LOG_SLOTS,
                    PACKED_LOG_PAGES,
                    CHUNK,
                    SIGNAL,
                    REDUCE,
                    EVICT,
                    False,
                    WIDTH,
                    SHIFT,
                    STRIDE,
                    HASH_HEADS,
                    SIGNAL != NONE,
                    EVICT != NEVER,
                    HAS_WINDOW,
                )
                least, oldest, victim = lower(least, oldest, victim, value, position, at | IN_PACKED)
    elif EVICT != NEVER:
        used = tl.where(grows, 0, n_chunks if PACKED else tl.cdiv(n, CHUNK))
        for first in range(0, used, CHUNKS):
            chunk = first + tl.arange(0, CHUNKS)
            ok = chunk < used
            value = tl.load(lowest_value + r * n_chunks + chunk, mask=ok, other=INF)
            position = tl.load(lowest_position + r * n_chunks + chunk, mask=ok, other=LAST_INT)
            at = tl.load(lowest_slot + r * n_chunks + chunk, mask=ok, other=LAST_INT)
            if PACKED:
                at = tl.where(chunk >= first_packed, at | IN_PACKED, at)
            low = tl.min(value, 0)
            old = tl.min(tl.where(value == low, position, LAST_INT), 0)
            here_slot = tl.min(tl.where((value == low) & (position == old), at, LAST_INT), 0)
            least, oldest, victim = lower(least, oldest, victim, low, old, here_slot)
    # all threads have read the lengths, and have written the accumulators, before one of them changes either
    tl.debug_barrier()
    if EVICT != NEVER:
        new_value = tl.full([], 0.0, tl.float32) + new_score
        if SHARED and SIGNAL != NONE:
            new_value = tl.full([], 0.0, tl.float32)
            for other in range(HEADS):
                new_value += received_by_new(new_logits, lse, s * HEADS + other, GROUP, GROUP_BLOCK, REDUCE)
            new_value = new_value * (1.0 / HEADS)
        new_value = plain_value(new_value, here, here, r % HASH_HEADS, seed, EVICT, WIDTH, SHIFT, STRIDE)
        new_value = ranked(new_value, here, here, tl.load(recent + r), sinks, window, HAS_WINDOW)
        stays = (new_value > least) | ((new_value == least) & (here >= oldest))
        stores = grows | stays
        gone = tl.where(grows, -1, tl.where(stays, oldest, here))
        if PACKED:
            buries = stays & (grows == 0) & ((victim & IN_PACKED) != 0)
            row_of = packed_table + r * packed_stride
            arena, row = locate(row_of, victim & (IN_PACKED - 1), buries, PACKED_LOG_SLOTS, PACKED_LOG_PAGES)
            at = slot_rows(packed_bases, packed_arenas, POSITIONS, arena, row, buries, 1, tl.int32)
            tl.store(at, -1, mask=buries)
            tl.store(dead + r, buried + 1, mask=buries)
            grows = grows | buries
        slot = tl.where(grows, n, victim)
    tl.store(evicted + r, gone)
    arena, row = locate(table + r * table_stride, slot, stores, LOG_SLOTS, LOG_PAGES)
    d = tl.arange(0, KEY_BLOCK)
    k_row = tl.load(k_new + s * k_s + h * k_h + d, mask=d < KEY_DIM, other=0.0)
    e = tl.arange(0, VALUE_BLOCK)
    v_row = tl.load(v_new + s * v_s + h * v_h + e, mask=e < VALUE_DIM, other=0.0)
    store_entry(
        bases, n_arenas, arena, row, stores, d, k_row, e, v_row, here, new_score, KEY_DIM, VALUE_DIM, TYPE, HAS_MASSES
    )
    tl.store(lens + r, tl.where(grows, n + 1, n))
