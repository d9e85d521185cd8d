"""Query-driven pruning of key channels: ThinK (Xu et al., ICLR 2025, arXiv:2407.21018)."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.errors import OptionError

#: Kept channels come in multiples of this: what a tile of codes needs.
MULTIPLE = 16


def channel_scores(q: Tensor, k: Tensor) -> Tensor:
    """What a channel adds to the logits: ||q_j||^2 ||k_j||^2, the squared norm of the rank-one part q_j k_j^T.

    Args:
        q: (Hq, S, D), the newest S queries. k: (Hkv, T, D). The group's query heads are averaged.

    Returns:
        (Hkv, D) float32, higher is kept.
    """
    by_head = q.float().square().sum(1).view(k.shape[0], -1, k.shape[2]).mean(1)
    return by_head * k.float().square().sum(1)


def kept_channels(scores: Tensor, ratio: float, *, pairs: bool = False) -> Tensor:
    """The channels that stay, ascending, (Hkv, n) int32; n is D (1 - ratio), rounded up to a multiple of 16.

    Args:
        scores: (Hkv, D). ratio: share of channels to drop, 0 <= ratio < 1.
        pairs: keep or drop whole rotation pairs (c, c + D / 2), scored by their sum: for keys stored before RoPE.

    Raises:
        OptionError: a ratio out of range.
    """
    if not 0 <= ratio < 1:
        raise OptionError(f"ratio={ratio} of pruned key channels must be at least 0 and below 1")
    dim = scores.shape[1]
    kept = min(dim, -(-(dim - int(dim * ratio)) // MULTIPLE) * MULTIPLE)
    if not pairs:
        return scores.topk(kept, 1).indices.sort(1).values.int()
    best = scores.reshape(-1, 2, dim // 2).sum(1).topk(kept // 2, 1).indices.sort(1).values
    return torch.cat([best, best + dim // 2], 1).int()
