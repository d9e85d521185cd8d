# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The two attention kernels of `decode`: partial attention over splits of the slots, and their combination.

Where nothing is scored and nothing leaves, the combination also appends the new entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millpond.kernels.gpu.common import (
    INF,
    KEYS,
    LN_2,
    LOG2_E,
    LOG_MASSES,
    POSITIONS,
    VALUES,
    locate,
    logit2,
    softmax_step,
    tile_rows,
)
from millpond.kernels.gpu.new_entry import store_entry, turned

SPLITS = tl.constexpr(32)  # partial results that `combine` loads at once


@triton.jit
def take_in(x, v, top, total, acc, DOT: tl.constexpr):
    """Return maximum, sum and output (G,), (G,), (G, V) of a softmax in base 2.

    Logits are x (G, N), values v (N, V).
    """
    top, total, p, fade = softmax_step(x, top, total)
    acc = tl.dot(p.to(DOT), v.to(DOT), acc * fade[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def store_part(part_out, part_max, part_sum, to, g, e, top, total, acc, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Write the state of `take_in`, for `combine`, into rows `to` (G,)."""
    tl.store(part_max + to, top, mask=g < GROUP)
    tl.store(part_sum + to, total, mask=g < GROUP)
    out_mask = (g < GROUP)[:, None] & (e < VALUE_DIM)[None, :]
    tl.store(part_out + to[:, None] * VALUE_DIM + e[None, :], acc, mask=out_mask)


@triton.jit(do_not_specialize=["n_arenas", "n_splits", "window"])
def attend(
    q,
    q_s,
    q_h,
    k_new,
    k_s,
    k_h,
    cos,
    cos_s,
    sin,
    sin_s,
    q_turned,
    k_turned,
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
    seen,
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
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
    DOT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
    HALF: tl.constexpr,
    TURN_TYPE: tl.constexpr,
):
    """Compute output, maximum and sum of one split for all query heads of a region.

    The logits are stored too if they are kept. The kernels behind get the lengths in `seen`, so that one of them may
    change them, and the rotated queries and new keys, contiguous, unless HALF is 0.
    """
    r = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    begin = split * SPLIT
    s = r // HEADS
    here = tl.load(q_pos + s)
    n = tl.load(lens + r)
    if split == 0:
        tl.store(seen + r, n)
    if here < 0 or begin >= n * (HALF == 0) + tl.maximum(n, 1) * (HALF > 0):
        return
    end = tl.minimum(n, begin + SPLIT)
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, KEY_BLOCK)
    e = tl.arange(0, VALUE_BLOCK)
    head = (r % HEADS) * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < KEY_DIM)[None, :]
    cos_row = cos + s * cos_s
    sin_row = sin + s * sin_s
    q_tile = turned(q + s * q_s + head[:, None] * q_h, d[None, :], q_mask, cos_row, sin_row, HALF, TURN_TYPE)  # (G, K)
    if HALF > 0:  # noqa: SIM102 - known at compile time
        if split == 0:
            to = (s * HEADS * GROUP + head[:, None]) * KEY_DIM + d[None, :]
            tl.store(q_turned + to, q_tile, mask=q_mask)
            k_mask = (d < KEY_DIM)[None, :]
            k_row = k_new + s * k_s + (r % HEADS) * k_h
            k_tile = turned(k_row, d[None, :], k_mask, cos_row, sin_row, HALF, TURN_TYPE)
            tl.store(k_turned + r * KEY_DIM + d[None, :], k_tile, mask=k_mask)
    q_tile = q_tile.to(DOT)
    top = tl.full([GROUP_BLOCK], -INF, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    table_row = table + r * table_stride
    logit_rows = logits + (r * GROUP + g) * (n_splits * SPLIT)
    for first in range(begin, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        ok = slot < n
        at = tile_rows(bases, n_arenas, KEYS, table_row, first, slot, ok, LOG_SLOTS, LOG_PAGES, BLOCK, KEY_DIM, TYPE)
        k = tl.load(at[:, None] + d[None, :], mask=ok[:, None] & (d < KEY_DIM)[None, :], other=0.0)  # (BLOCK, K)
        at = tile_rows(
            bases, n_arenas, VALUES, table_row, first, slot, ok, LOG_SLOTS, LOG_PAGES, BLOCK, VALUE_DIM, TYPE
        )
        v = tl.load(at[:, None] + e[None, :], mask=ok[:, None] & (e < VALUE_DIM)[None, :], other=0.0)  # (BLOCK, V)
        visible = ok
        if HAS_WINDOW:
            at = tile_rows(
                bases, n_arenas, POSITIONS, table_row, first, slot, ok, LOG_SLOTS, LOG_PAGES, BLOCK, 1, tl.int32
            )
            visible = ok & (here - tl.load(at, mask=ok, other=0) < window)
        x = logit2(tl.dot(q_tile, tl.trans(k.to(DOT)), input_precision="ieee"), scale, softcap, HAS_CAP)
        if HAS_MASSES:
            at = tile_rows(
                bases, n_arenas, LOG_MASSES, table_row, first, slot, ok, LOG_SLOTS, LOG_PAGES, BLOCK, 1, tl.float32
            )
            x += (tl.load(at, mask=ok, other=0.0) * LOG2_E)[None, :]
        x = tl.where(visible[None, :], x, -INF)
        if KEEP_LOGITS:
            tl.store(logit_rows[:, None] + slot[None, :], x, mask=(g < GROUP)[:, None] & ok[None, :])
        top, total, acc = take_in(x, v, top, total, acc, DOT)
    to = (r * n_splits + split) * GROUP + g
    store_part(part_out, part_max, part_sum, to, g, e, top, total, acc, GROUP, VALUE_DIM)


@triton.jit(do_not_specialize=["n_splits", "first_packed", "n_arenas"])
def combine(
    q,
    q_s,
    q_h,
    k_new,
    k_s,
    k_h,
    v_new,
    v_s,
    v_h,
    seen,
    packed_lens,
    q_pos,
    part_out,
    part_max,
    part_sum,
    n_splits,
    first_packed,
    sink_logits,
    out,
    lse,
    new_logits,
    scale,
    softcap,
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    evicted,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    PACKED: tl.constexpr,
    APPENDS: tl.constexpr,
):
    """Output and log-sum-exp of one query head over its splits, its new entry and its sink.

    Regions with a PACKED part have splits of `packed_lens` slots from `first_packed` on. If it APPENDS, the first query
    head of a region stores the new entry in slot `seen` and writes `lens`, which nobody reads then.
    """
    r = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    s = r // HEADS
    h = r % HEADS
    head = h * GROUP + g
    d = tl.arange(0, KEY_BLOCK)
    e = tl.arange(0, VALUE_BLOCK)
    out_row = out + (s * HEADS * GROUP + head) * VALUE_DIM
    here = tl.load(q_pos + s)
    if here < 0:
        tl.store(out_row + e, tl.zeros([VALUE_BLOCK], tl.float32).to(out.dtype.element_ty), mask=e < VALUE_DIM)
        tl.store(lse + s * HEADS * GROUP + head, -INF)
        if APPENDS:
            tl.store(evicted + r, -1, mask=g == 0)
        return
    q_row = tl.load(q + s * q_s + head * q_h + d, mask=d < KEY_DIM, other=0.0).to(tl.float32)
    k_own = tl.load(k_new + s * k_s + h * k_h + d, mask=d < KEY_DIM, other=0.0)
    v_own = tl.load(v_new + s * v_s + h * v_h + e, mask=e < VALUE_DIM, other=0.0)
    v_row = v_own.to(tl.float32)
    new = logit2(tl.sum(q_row * k_own.to(tl.float32), 0), scale, softcap, HAS_CAP)
    tl.store(new_logits + s * HEADS * GROUP + head, new)
    top = new
    total = tl.exp2(new - top)  # 1, and NaN where the logit is
    acc = v_row
    if HAS_SINK:
        sink = tl.load(sink_logits + head) * LOG2_E
        top = tl.maximum(new, sink)
        weight = tl.exp2(new - top)
        total = weight + tl.exp2(sink - top)
        acc = v_row * weight
    n = tl.load(seen + r)
    plain = tl.cdiv(n, SPLIT)
    used = plain
    if PACKED:
        used += tl.cdiv(tl.load(packed_lens + r), SPLIT)
    for first in range(0, used, SPLITS):
        split = first + tl.arange(0, SPLITS)
        ok = split < used
        if PACKED:  # splits past the length of the plain part were not written
            split = tl.where(split < plain, split, first_packed + split - plain)
        at = (r * n_splits + split) * GROUP + g
        tops = tl.load(part_max + at, mask=ok, other=-INF)
        sums = tl.load(part_sum + at, mask=ok, other=0.0)
        outs = tl.load(
            part_out + at[:, None] * VALUE_DIM + e[None, :], mask=ok[:, None] & (e < VALUE_DIM)[None, :], other=0.0
        )  # (SPLITS, V)
        new_top = tl.maximum(top, tl.max(tops, 0))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(tops - new_top)
        total = total * fade + tl.sum(sums * weights, 0)
        acc = acc * fade + tl.sum(outs * weights[:, None], 0)
        top = new_top
    tl.store(out_row + e, (acc / total).to(out.dtype.element_ty), mask=e < VALUE_DIM)
    tl.store(lse + s * HEADS * GROUP + head, (top + tl.log2(total)) * LN_2)
    if APPENDS:
        stores = g == 0
        arena, row = locate(table + r * table_stride, n, stores, LOG_SLOTS, LOG_PAGES)
        store_entry(
            bases, n_arenas, arena, row, stores, d, k_own, e, v_own, here, 0.0, KEY_DIM, VALUE_DIM, TYPE, HAS_MASSES
        )
        tl.store(evicted + r, -1, mask=stores)
        tl.store(lens + r, n + 1, mask=stores)
