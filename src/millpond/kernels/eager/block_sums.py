"""Attention of one query of each sequence as sums beside blocks, in plain torch: see `ops.block_sums`."""

from __future__ import annotations

import torch

from millpond.kernels.block_args import BlockSumsArgs
from millpond.kernels.eager.softmax import reduce_group, soft_cap, softmax_with_sink, wide


def block_sums(args: BlockSumsArgs) -> None:
    q, order, lens, shape, dtype = args.q, args.order, args.lens, args.shape, wide(args.q.dtype)
    block, n_kv_heads, dim = len(order.row_at), args.keys.shape[1], q.shape[2]
    n_blocks = -(-int(lens.max()) // block) if len(lens) else 0
    if not n_blocks:
        return
    ids = args.table[:, :n_blocks].long()
    keys = args.keys[ids][..., order.at.flatten()]  # (S, n, Hkv, block * D)
    keys = keys.view(*keys.shape[:3], block, dim).transpose(1, 2).reshape(len(q), n_kv_heads, -1, dim)
    rows = q.to(dtype).view(len(q), n_kv_heads, -1, dim)
    logits = soft_cap(rows @ keys.to(dtype).transpose(2, 3) * shape.scale, shape.softcap)
    column = torch.arange(n_blocks * block, device=q.device)
    visible = column < lens[:, None]
    sink = None if shape.sink_logits is None else shape.sink_logits.to(dtype).view(1, n_kv_heads, -1, 1)
    p, _ = softmax_with_sink(logits, visible[:, None, None], sink)
    shares = reduce_group(p, args.reduce, 2).float().view(len(q), n_kv_heads, n_blocks, block).transpose(1, 2)
    older = (column < lens[:, None] - 1).view(len(q), n_blocks, 1, block)  # the newest has gathered nothing yet
    used = (column[::block] < lens[:, None]).nonzero(as_tuple=True)
    before = args.sums[ids[used]]
    kept = torch.where(visible.view(older.shape)[used], torch.zeros_like(before), before)
    gathered = torch.where(older[used], before * args.decay, kept)
    args.sums[ids[used]] = gathered + shares[used]
