"""Blocks of another engine, with keys in the orders that its kernels use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millpond.kernels.args import AttentionShape
from millpond.kernels.block_args import BlockSumsArgs, KeyOrder


def places(kind: str, block: int, dim: int) -> Tensor:
    """Return (block, dim) int64: where each number lies."""
    token, channel = torch.arange(block)[:, None], torch.arange(dim)[None]
    if kind == "plain":
        return token * dim + channel
    run = 32 if block % 32 == 0 else 16
    if kind == "turned":  # runs of tokens, channel by channel
        return token // run * run * dim + channel * run + token % run
    if kind == "pairs":
        return token // 16 * 16 * dim + channel // 2 * 32 + token % 16 * 2 + channel % 2
    return channel * block + (block - 1 - token)  # backwards


def block_sums_args(
    kind: str,
    lens: list[int],
    *,
    seed: int,
    heads: tuple[int, int] = (2, 3),
    dim: int = 64,
    block: int = 32,
    dtype: torch.dtype = torch.float32,
    softcap: float = 0.0,
    sinks: bool = False,
    device: str = "cpu",
    **options: Any,
) -> BlockSumsArgs:
    """Return arguments with random queries, keys and sums; the blocks of the sequences lie in no order."""
    gen = torch.Generator().manual_seed(seed)
    n_kv_heads, group = heads
    n_blocks = [-(-n // block) for n in lens]
    ids = torch.randperm(sum(n_blocks) + 3, generator=gen) + 1
    table = torch.zeros(len(lens), max([*n_blocks, 1]) + 2, dtype=torch.int32)
    begin = 0
    for row, n in enumerate(n_blocks):
        table[row, :n] = ids[begin : begin + n].int()
        begin += n
    cache = torch.randn(len(ids) + 1, n_kv_heads, 2, block * dim, generator=gen).to(dtype)
    cache[:, :, 1] = torch.nan  # values are not read
    q = torch.randn(len(lens), n_kv_heads * group, dim, generator=gen).to(dtype)
    sink = torch.randn(n_kv_heads * group, generator=gen).to(device) if sinks else None
    sums = torch.rand(len(cache), n_kv_heads, block, generator=gen)
    order = KeyOrder.of(places(kind, block, dim).to(device))
    return BlockSumsArgs(
        q.to(device),
        cache.to(device)[:, :, 0],
        order,
        table.to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        sums.to(device),
        AttentionShape(dim**-0.5, softcap, sink_logits=sink),
        **options,
    )


def keys_of(args: BlockSumsArgs, row: int) -> Tensor:
    """Return (Hkv, n, dim): the keys of one sequence, an entry at a time."""
    n, block = int(args.lens[row]), len(args.order.row_at)
    at = args.order.at
    parts = [args.keys[args.table[row, j // block].item()][:, at[j % block]] for j in range(n)]
    return torch.stack(parts, 1)
