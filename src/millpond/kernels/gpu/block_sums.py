# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of one query of each sequence as sums beside blocks, in Triton.

One program per sequence and KV head: it walks over the keys for the denominators, and again for the shares. Lengths
stay on the device, so that the launch can be recorded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.kernels.block_args import BlockSumsArgs
from millpond.kernels.gpu.common import (
    INF,
    LOG2_E,
    REDUCE_MAX,
    REDUCE_MEAN,
    block_of,
    check,
    dot_type,
    logit2,
    on_its_device,
    rows_of,
)

#: Entries that are read together.
TILE = 32


@triton.jit
def tile_logits(
    q_tile,
    keys,
    k_block,
    row_at,
    channel_at,
    table_row,
    entry,
    n,
    d,
    scale,
    softcap,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DOT: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Return logits (G, TILE) in base 2 of entries (TILE,), and the block of each."""
    ok = entry < n
    block = tl.load(table_row + entry // BLOCK, mask=ok, other=0).to(tl.int64)
    at = block * k_block + tl.load(row_at + entry % BLOCK)
    mask = ok[:, None] & (d < DIM)[None, :]
    k = tl.load(keys + at[:, None] + channel_at[None, :], mask=mask, other=0.0)  # (TILE, D)
    x = logit2(tl.dot(q_tile, tl.trans(k.to(DOT)), input_precision="ieee"), scale, softcap, HAS_CAP)
    return tl.where(ok[None, :], x, -INF), block


@triton.jit
def add_shares(
    q,
    q_s,
    q_h,
    keys,
    k_block,
    k_head,
    row_at,
    column_at,
    table,
    table_stride,
    lens,
    sink_logits,
    sums,
    scale,
    softcap,
    decay,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    REDUCE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the shares of the entries of one sequence and KV head to their sums."""
    s = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    n = tl.load(lens + s)
    if n <= 0:
        return
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, DIM_BLOCK)
    query_head = head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q_tile = tl.load(q + s * q_s + query_head[:, None] * q_h + d[None, :], mask=q_mask, other=0.0).to(DOT)
    channel_at = tl.load(column_at + d, mask=d < DIM, other=0)
    table_row = table + s * table_stride
    keys += head * k_head
    top = tl.full([GROUP_BLOCK], -INF, tl.float32)
    if HAS_SINK:
        top = tl.load(sink_logits + query_head, mask=g < GROUP, other=0.0) * LOG2_E
    total = tl.where(top == -INF, 0.0, 1.0)
    for first in range(0, n, TILE):
        entry = first + tl.arange(0, TILE)
        x, block = tile_logits(
            q_tile, keys, k_block, row_at, channel_at, table_row, entry, n, d, scale, softcap, BLOCK, DIM, DOT, HAS_CAP
        )
        new_top = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(x - new_top[:, None]), 1)
        top = new_top
    for first in range(0, n, TILE):
        entry = first + tl.arange(0, TILE)
        x, block = tile_logits(
            q_tile, keys, k_block, row_at, channel_at, table_row, entry, n, d, scale, softcap, BLOCK, DIM, DOT, HAS_CAP
        )
        p = tl.exp2(x - top[:, None]) / total[:, None]
        p = tl.where((g < GROUP)[:, None], p, 0.0)
        share = tl.max(p, 0) if REDUCE == REDUCE_MAX else tl.sum(p, 0)
        if REDUCE == REDUCE_MEAN:
            share = share / GROUP
        to = sums + (block * HEADS + head) * BLOCK + entry % BLOCK
        before = tl.load(to, mask=entry < n - 1, other=0.0)  # the newest entry has gathered nothing yet
        tl.store(to, before * decay + share, mask=entry < n)


@on_its_device
def block_sums(args: BlockSumsArgs) -> None:
    """Run `OpSet.block_sums`."""
    check(args.q.device, args.q.dtype, args.keys.dtype)
    q, table, shape = rows_of(args.q), rows_of(args.table), args.shape
    n_seq, n_heads, dim = q.shape
    n_kv_heads = args.keys.shape[1]
    if not n_seq:
        return
    group = n_heads // n_kv_heads
    add_shares[(n_seq, n_kv_heads)](
        q,
        *q.stride()[:2],
        args.keys,
        *args.keys.stride()[:2],
        args.order.row_at,
        args.order.column_at,
        table,
        table.stride(0),
        args.lens.contiguous(),
        args.sums if shape.sink_logits is None else shape.sink_logits.to(torch.float32).contiguous(),
        args.sums,
        float(shape.scale),
        float(shape.softcap),
        float(args.decay),
        HEADS=n_kv_heads,
        GROUP=group,
        GROUP_BLOCK=block_of(group),
        DIM=dim,
        DIM_BLOCK=block_of(dim),
        BLOCK=len(args.order.row_at),
        DOT=dot_type(q.dtype, args.keys.dtype),
        REDUCE=int(args.reduce),
        HAS_CAP=shape.softcap != 0.0,
        HAS_SINK=shape.sink_logits is not None,
        TILE=TILE,
    )
