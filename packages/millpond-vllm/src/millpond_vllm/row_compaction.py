"""Rows of block tables without null blocks, as attention kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor


def without_null_blocks(rows: Tensor, lengths: Tensor, block: int, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return rows without their null blocks, and lengths that are shorter by as many blocks.

    Without a wait for the device, so that the results can be copied into the inputs of recorded graphs. A row with
    tokens keeps one at least: rows of null blocks alone are those of a graph that is recorded.

    Args:
        rows: (S, M) block ids; the null block is 0.
        lengths: (S,) tokens of each row.
        block: Tokens of a block of the kernel.
        parts: Blocks of the kernel in one of the manager: the null block is 0 to parts - 1.
    """
    width = rows.shape[1]
    column = torch.arange(width, device=rows.device)[None]
    used = column < ((lengths + block - 1) // block)[:, None]
    null = used & (rows < parts)
    gone = null.cumsum(1)
    place = torch.where(null, width, column - gone)
    packed = torch.zeros(len(rows), width + 1, dtype=rows.dtype, device=rows.device).scatter_(1, place, rows)
    shorter = (lengths - gone[:, -1].to(lengths.dtype) * block).clamp(min=1)
    return packed[:, :-1].contiguous(), torch.minimum(lengths, shorter)
