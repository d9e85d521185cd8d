"""Rows of block tables without null blocks, as attention kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor


def without_null_blocks(rows: Tensor, lengths: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return rows without their null blocks, and lengths that are shorter by as many blocks.

    Without a wait for the device, so that the results can be copied into the inputs of recorded graphs.

    Args:
        rows: (S, M) block ids; 0 is the null block.
        lengths: (S,) tokens of each row.
        block: Tokens of a block.
    """
    width = rows.shape[1]
    column = torch.arange(width, device=rows.device)[None]
    used = column < ((lengths + block - 1) // block)[:, None]
    null = used & (rows == 0)
    gone = null.cumsum(1)
    place = torch.where(null, width, column - gone)
    packed = torch.zeros(len(rows), width + 1, dtype=rows.dtype, device=rows.device).scatter_(1, place, rows)
    return packed[:, :-1].contiguous(), lengths - gone[:, -1].to(lengths.dtype) * block
