"""Selection of the best entries of each head, ties to the newest."""

from __future__ import annotations

import torch
from torch import Tensor

#: Bits of a priority below its value: which entry it is.
_ENTRY_BITS = 31


def priority(value: Tensor, valid: Tensor, pinned: Tensor) -> Tensor:
    """Return (H, N) int64 priorities, no two alike, higher is kept longer.

    Pinned entries come first, then order is by value, the newest, the first head. Invalid ones come last. Values are
    compared as float32.

    Args:
        value: (H, N), higher is kept.
        valid: (H, N) bool, False in columns without an entry. Columns ascend in position.
        pinned: (H, N) bool, entries that are kept first.
    """
    bits = (value.float() + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the floats
    ascending = ascending.masked_fill(pinned, 1 << 31).masked_fill(~valid, -(1 << 31) - 1)
    entry = torch.arange(value.numel(), device=value.device).view(value.shape).flip(0)
    return (ascending << _ENTRY_BITS) + entry


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
