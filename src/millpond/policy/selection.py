"""Selection of the best entries of each head, ties to the newest."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.eager.selection import priority


def rank_by_value(value: Tensor, valid: Tensor, pinned: Tensor) -> Tensor:
    """Return the rank (H, N) of each entry in its head by `priority`; 0 is kept longest."""
    order = priority(value, valid, pinned).argsort(dim=1, descending=True)
    ranks = torch.arange(value.shape[1], device=value.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def keep_best(value: Tensor, valid: Tensor, pinned: Tensor, counts: Tensor) -> Tensor:
    """Return (H, N) bool: the `counts[h]` best valid entries of each head."""
    max_count = min(int(counts.max()), value.shape[1])
    if max_count <= 0:
        return torch.zeros_like(valid)
    key = priority(value, valid, pinned)
    best = key.topk(max_count, dim=1).values
    lowest = best.gather(1, (counts[:, None] - 1).clamp(0, max_count - 1))
    return valid & (key >= lowest) & (counts[:, None] > 0)
