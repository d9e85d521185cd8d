# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Partial attention over splits of packed pages: `attend` for quantized entries."""

from __future__ import annotations

import triton
import triton.language as tl

from millpond.kernels.gpu.attend import store_part, take_in
from millpond.kernels.gpu.codes import LANES, beside_at, numbers_at
from millpond.kernels.gpu.common import INF, KEYS, LOG2_E, LOG_MASSES, POSITIONS, logit2, tile_rows


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
    """Output, maximum and sum of one split for all query heads of a region, as split first_split + it of n_splits.

    BLOCK slots lie in one page. A slot at position -1 holds nothing. Where keys are stored before RoPE, one of them
    meets the query twice: times the cosines of its position as it is, and times the sines with the channels of each
    pair of the query exchanged.
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
