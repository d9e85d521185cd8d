"""Selection: the best entries of each head, ties to the newest."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_by_value(value: Tensor, valid: Tensor, pinned: Tensor) -> Tensor:
    """The rank (H, N) of each entry in its head: pinned first, then by value, ties to the newest; 0 is kept longest.

    Args:
        value: (H, N), higher is kept. valid, pinned: (H, N) bool. Columns ascend in position.
    """
    key = value.double().masked_fill(pinned, float("inf")).masked_fill(~valid, float("-inf"))
    order = torch.sort(key.flip(1), dim=1, descending=True, stable=True).indices
    order = value.shape[1] - 1 - order
    # an invalid column may tie with a valid one of value -inf: push it behind
    behind = torch.gather(~valid, 1, order)
    order = order.gather(1, torch.sort(behind.int(), dim=1, stable=True).indices)
    ranks = torch.arange(value.shape[1], device=value.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def keep_best(value: Tensor, valid: Tensor, pinned: Tensor, counts: Tensor) -> Tensor:
    """(H, N) bool: the `counts[h]` best valid entries of each head."""
    return valid & (rank_by_value(value, valid, pinned) < counts[:, None])
