# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Causal attention of many new queries, and the column sums of its probabilities from the log-sum-exp.

The first kernel walks over column blocks for each block of query rows; the second walks over row blocks for each
block of columns and sums exp(logit - lse). No (Q, N) matrix, no atomics: each number is summed by one program in a
fixed order.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.args import PrefillArgs, PrefillOutput
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.gpu.columns import SUMS_TILES, Tile, add_weights, reduced, tile_for
from millpond.kernels.gpu.common import (
    INF,
    LN_2,
    LOG2_E,
    block_of,
    check,
    dot_type,
    logit2,
    on_its_device,
    rows_of,
    seen_logits,
    softmax_step,
)


@triton.jit
def attend_tile(
    q_tile,
    top,
    total,
    acc,
    k_rows,
    v_rows,
    positions,
    log_masses,
    row_pos,
    first,
    end,
    d,
    e,
    scale,
    softcap,
    window,
    k_n,
    v_n,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_MASSES: tl.constexpr,
):
    """Take one step of the online softmax over columns first .. first + BLOCK - 1.

    The columns are those of k_rows, v_rows and positions.
    """
    column = first + tl.arange(0, BLOCK)
    offset = column.to(tl.int64)
    k_mask = (d < KEY_DIM)[:, None]
    v_mask = (e < VALUE_DIM)[None, :]
    if MASKED:
        k_mask = k_mask & (column < end)[None, :]
        v_mask = v_mask & (column < end)[:, None]
    k = tl.load(k_rows + offset[None, :] * k_n + d[:, None], mask=k_mask, other=0.0)  # (K, BLOCK)
    v = tl.load(v_rows + offset[:, None] * v_n + e[None, :], mask=v_mask, other=0.0)  # (BLOCK, V)
    x = logit2(tl.dot(q_tile, k.to(DOT), input_precision="ieee"), scale, softcap, HAS_CAP)
    if HAS_MASSES:
        x += (tl.load(log_masses + column, mask=column < end, other=0.0) * LOG2_E)[None, :]
    if MASKED:
        position = tl.load(positions + column, mask=column < end, other=-1)[None, :]
        visible = (position >= 0) & (position <= row_pos[:, None])
        if HAS_WINDOW:
            visible = visible & (row_pos[:, None] - position < window)
        x = tl.where(visible, x, -INF)
    top, total, p, fade = softmax_step(x, top, total)
    acc = tl.dot(p.to(DOT), v.to(DOT), acc * fade[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit(do_not_specialize=["n_rows", "n_past", "window"])
def forward(
    q,
    q_h,
    q_n,
    k,
    k_h,
    k_n,
    v,
    v_h,
    v_n,
    q_pos,
    past_pos,
    past_h,
    log_masses,
    mass_h,
    sink_logits,
    out,
    lse,
    n_rows,
    n_past,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_MASSES: tl.constexpr,
):
    """Output and log-sum-exp of ROWS query rows of one query head."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the long rows start first
    head = tl.program_id(1).to(tl.int64)
    kv = head // GROUP
    row = first_row + tl.arange(0, ROWS)
    inside = row < n_rows
    d = tl.arange(0, KEY_BLOCK)
    e = tl.arange(0, VALUE_BLOCK)
    long_row = row.to(tl.int64)
    q_mask = inside[:, None] & (d < KEY_DIM)[None, :]
    q_tile = tl.load(q + head * q_h + long_row[:, None] * q_n + d[None, :], mask=q_mask, other=0.0).to(DOT)
    row_pos = tl.load(q_pos + row, mask=inside, other=-1)
    top = tl.full([ROWS], -INF, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINK:
        top = tl.zeros([ROWS], tl.float32) + tl.load(sink_logits + head) * LOG2_E
        total = tl.where(top == -INF, 0.0, 1.0)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    k_rows = k + kv * k_h
    v_rows = v + kv * v_h
    for first in range(0, n_past, BLOCK):
        top, total, acc = attend_tile(
            q_tile,
            top,
            total,
            acc,
            k_rows,
            v_rows,
            past_pos + kv * past_h,
            log_masses + kv * mass_h,
            row_pos,
            first,
            n_past,
            d,
            e,
            scale,
            softcap,
            window,
            k_n,
            v_n,
            KEY_DIM,
            VALUE_DIM,
            BLOCK,
            DOT,
            HAS_CAP,
            HAS_WINDOW,
            True,
            HAS_MASSES,
        )
    k_rows += n_past.to(tl.int64) * k_n
    v_rows += n_past.to(tl.int64) * v_n
    begin = 0
    if HAS_WINDOW:
        # positions ascend by at least 1 a row, so what lies `window` rows back is hidden
        begin = tl.maximum(first_row - window + 1, 0) // BLOCK * BLOCK
    diagonal = first_row // BLOCK * BLOCK
    end = tl.minimum(first_row + ROWS, n_rows)
    if HAS_WINDOW:
        diagonal = begin
    for first in range(begin, diagonal, BLOCK):
        top, total, acc = attend_tile(
            q_tile,
            top,
            total,
            acc,
            k_rows,
            v_rows,
            q_pos,
            log_masses,
            row_pos,
            first,
            n_rows,
            d,
            e,
            scale,
            softcap,
            window,
            k_n,
            v_n,
            KEY_DIM,
            VALUE_DIM,
            BLOCK,
            DOT,
            HAS_CAP,
            HAS_WINDOW,
            False,
            False,
        )
    for first in range(diagonal, end, BLOCK):
        top, total, acc = attend_tile(
            q_tile,
            top,
            total,
            acc,
            k_rows,
            v_rows,
            q_pos,
            log_masses,
            row_pos,
            first,
            n_rows,
            d,
            e,
            scale,
            softcap,
            window,
            k_n,
            v_n,
            KEY_DIM,
            VALUE_DIM,
            BLOCK,
            DOT,
            HAS_CAP,
            HAS_WINDOW,
            True,
            False,
        )
    seen = total > 0.0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    base = (head * n_rows + long_row) * VALUE_DIM
    out_mask = inside[:, None] & (e < VALUE_DIM)[None, :]
    tl.store(out + base[:, None] + e[None, :], acc.to(out.dtype.element_ty), mask=out_mask)
    norm = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN_2, -INF)
    tl.store(lse + head * n_rows + row, norm, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_past", "window"])
def column_sums(
    q,
    q_h,
    q_n,
    k,
    k_h,
    k_n,
    q_pos,
    past_pos,
    past_h,
    log_masses,
    mass_h,
    lse,
    sums,
    n_rows,
    n_past,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Sum the probabilities in BLOCK columns of one KV head over all rows, reduced by group."""
    first = tl.program_id(0) * BLOCK
    kv = tl.program_id(1).to(tl.int64)
    n_columns = n_past + n_rows
    column = first + tl.arange(0, BLOCK)
    is_past = column < n_past
    d = tl.arange(0, KEY_BLOCK)
    k_mask = (d < KEY_DIM)[:, None] & (column < n_columns)[None, :]
    k_tile = tl.load(k + kv * k_h + column.to(tl.int64)[None, :] * k_n + d[:, None], mask=k_mask, other=0.0).to(DOT)
    old = tl.load(past_pos + kv * past_h + column, mask=is_past, other=-1)
    new = tl.load(q_pos + column - n_past, mask=(column >= n_past) & (column < n_columns), other=-1)
    position = tl.where(is_past, old, new)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_MASSES:
        bias = tl.load(log_masses + kv * mass_h + column, mask=is_past, other=0.0) * LOG2_E
    # rows above the diagonal see none of these columns; nor do, under a window, rows far below
    begin = tl.maximum(first - n_past, 0) // ROWS * ROWS
    end = n_rows
    if HAS_WINDOW:
        end = tl.where(first >= n_past, tl.minimum(n_rows, first + BLOCK - n_past + window), n_rows)
    tile = tl.zeros([ROWS, BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # one flat loop over (row block, query head): the inner one alone is too short to pipeline
    for step in range(0, tl.cdiv(tl.maximum(end - begin, 0), ROWS) * GROUP):
        g = step % GROUP
        head = kv * GROUP + g
        row = begin + step // GROUP * ROWS + tl.arange(0, ROWS)
        inside = row < n_rows
        q_mask = inside[:, None] & (d < KEY_DIM)[None, :]
        q_tile = tl.load(q + head * q_h + row.to(tl.int64)[:, None] * q_n + d[None, :], mask=q_mask, other=0.0).to(DOT)
        norm = tl.load(lse + head * n_rows + row, mask=inside, other=0.0) * LOG2_E
        row_pos = tl.load(q_pos + row, mask=inside, other=-1)
        x = seen_logits(
            q_tile, row_pos, k_tile, position, bias, scale, softcap, window, HAS_CAP, HAS_WINDOW, HAS_MASSES
        )
        tile, total = add_weights(tile, total, x, norm, g, GROUP, REDUCE)
    tl.store(sums + kv * n_columns + column, reduced(tile, total, GROUP, REDUCE), mask=column < n_columns)


#: As `SUMS_TILES`, of `forward`.
FORWARD_TILES = (Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(16, 16, 4, 1)), Tile(32, 16, 8, 1)


def _past(past_pos: Tensor | None, q_pos: Tensor) -> tuple[Tensor, int]:
    """Return the positions of the stored entries, and their stride by KV head (0: all share)."""
    if past_pos is None:
        return q_pos, 0
    past_pos = rows_of(past_pos)
    return past_pos, past_pos.stride(0) if past_pos.shape[0] > 1 else 0


def masses_of(past_log_masses: Tensor | None, lse: Tensor) -> tuple[Tensor, int]:
    """Return the log masses of the stored entries, with a stride as in `_past`.

    Any float32 tensor if there are none.
    """
    if past_log_masses is None:
        return lse, 0
    past_log_masses = rows_of(past_log_masses.float())
    return past_log_masses, past_log_masses.stride(0) if past_log_masses.shape[0] > 1 else 0


@on_its_device
def prefill(args: PrefillArgs) -> PrefillOutput:
    shape = args.shape
    check(args.q.device, args.q.dtype)
    n_heads, n_rows, key_dim = args.q.shape
    n_kv_heads, n_columns, value_dim = args.v.shape
    q, k, v = rows_of(args.q), rows_of(args.k.to(args.q.dtype)), rows_of(args.v.to(args.q.dtype))
    q_pos = args.q_pos.contiguous()
    past, past_stride = _past(args.past_pos, q_pos)
    out = torch.empty(n_heads, n_rows, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(n_heads, n_rows, dtype=torch.float32, device=q.device)
    tile = tile_for(FORWARD_TILES, block_of(max(key_dim, value_dim)), q.dtype)
    if n_rows and n_heads:
        forward[(triton.cdiv(n_rows, tile.rows), n_heads)](
            q,
            *q.stride()[:2],
            k,
            *k.stride()[:2],
            v,
            *v.stride()[:2],
            q_pos,
            past,
            past_stride,
            *masses_of(args.past_log_masses, lse),
            shape.sink_logits.float().contiguous() if shape.sink_logits is not None else lse,
            out,
            lse,
            n_rows,
            n_columns - n_rows,
            float(shape.scale),
            float(shape.softcap),
            shape.window,
            GROUP=n_heads // n_kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_BLOCK=block_of(key_dim),
            VALUE_BLOCK=block_of(value_dim),
            ROWS=tile.rows,
            BLOCK=tile.block,
            DOT=dot_type(q.dtype, q.dtype),
            HAS_CAP=shape.softcap != 0.0,
            HAS_WINDOW=shape.window > 0,
            HAS_SINK=shape.sink_logits is not None,
            HAS_MASSES=args.past_log_masses is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if args.colsum is None:
        return PrefillOutput(out, lse, None)
    known = lse
    if args.decay != 1:  # a larger denominator is a smaller weight
        known = lse - torch.arange(n_rows - 1, -1, -1, device=q.device) * math.log(args.decay)
    return PrefillOutput(out, lse, _column_sums(replace(args, q=q, k=k, q_pos=q_pos), args.colsum, known))


def _column_sums(args: PrefillArgs, reduce: Reduce, lse: Tensor) -> Tensor:
    """Return (Hkv, N) float32 from the log of each denominator, lse (Hq, Q).

    Rows are contiguous.
    """
    q, k, shape = args.q, args.k, args.shape
    n_heads, n_rows, key_dim = q.shape
    n_kv_heads, n_columns = k.shape[:2]
    past, past_stride = _past(args.past_pos, args.q_pos)
    sums = torch.empty(n_kv_heads, n_columns, dtype=torch.float32, device=q.device)
    tile = tile_for(SUMS_TILES, block_of(key_dim), q.dtype)
    if n_kv_heads and n_columns:
        column_sums[(triton.cdiv(n_columns, tile.block), n_kv_heads)](
            q,
            *q.stride()[:2],
            k,
            *k.stride()[:2],
            args.q_pos,
            past,
            past_stride,
            *masses_of(args.past_log_masses, lse),
            lse,
            sums,
            n_rows,
            n_columns - n_rows,
            float(shape.scale),
            float(shape.softcap),
            shape.window,
            GROUP=n_heads // n_kv_heads,
            KEY_DIM=key_dim,
            KEY_BLOCK=block_of(key_dim),
            ROWS=tile.rows,
            BLOCK=tile.block,
            DOT=dot_type(q.dtype, q.dtype),
            HAS_CAP=shape.softcap != 0.0,
            HAS_WINDOW=shape.window > 0,
            HAS_MASSES=args.past_log_masses is not None,
            REDUCE=int(reduce),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return sums
