"""Channels: ThinK's pruning by queries (arXiv:2407.21018) and MiKV's outlier balancer (arXiv:2402.18096)."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.errors import OptionError

#: Kept channels come in multiples of this: what a tile of codes needs.
MULTIPLE = 16


def channel_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return the contribution of each key channel to the logits: ||q_j||^2 ||k_j||^2.

    It is the squared norm of the rank-one part q_j k_j^T.

    Args:
        q: (Hq, S, D), the newest S queries.
        k: (Hkv, T, D). The group's query heads are averaged.

    Returns:
        (Hkv, D) float32, higher is kept.
    """
    by_head = q.float().square().sum(1).view(k.shape[0], -1, k.shape[2]).mean(1)
    return by_head * k.float().square().sum(1)


def value_channel_scores(outputs: Tensor, norms: Tensor, n_kv_heads: int) -> Tensor:
    """Return what each value channel adds to the layer's output: ||(A V)_j||^2 ||W_j||^2.

    It is the squared norm of the rank-one part (A V)_j W_j, for the rows A of the newest queries.

    Args:
        outputs: (Hq, S, V), what the newest S queries read: A V. The query heads of a KV head are averaged.
        norms: (Hq, V), norms of the rows of the output projection, ||W_j||.
        n_kv_heads: KV heads.

    Returns:
        (Hkv, V) float32, higher is kept.
    """
    by_head = outputs.float().square().sum(1) * norms.float().square()
    return by_head.view(n_kv_heads, -1, by_head.shape[1]).mean(1)


def kept_channels(scores: Tensor, ratio: float, *, pairs: bool = False) -> Tensor:
    """Return the channels of keys or values to keep, ascending, (Hkv, n) int32.

    n is D (1 - ratio), rounded up to a multiple of 16.

    Args:
        scores: (Hkv, D).
        ratio: Share of channels to drop, 0 <= ratio < 1.
        pairs: Keep or drop whole rotation pairs (c, c + D / 2), scored by their sum: for keys stored before RoPE.

    Raises:
        OptionError: a ratio out of range.
    """
    if not 0 <= ratio < 1:
        raise OptionError(f"ratio={ratio} of pruned channels must be at least 0 and below 1")
    dim = scores.shape[1]
    n_kept = min(dim, -(-(dim - int(dim * ratio)) // MULTIPLE) * MULTIPLE)
    if not pairs:
        return scores.topk(n_kept, 1).indices.sort(1).values.int()
    best = scores.reshape(-1, 2, dim // 2).sum(1).topk(n_kept // 2, 1).indices.sort(1).values
    return torch.cat([best, best + dim // 2], 1).int()


#: Bounds of b: a channel that is zero on one side must not blow up the other.
LEAST, MOST = 1e-2, 1e2


def query_balance(q: Tensor, k: Tensor, *, tie_pairs: bool = False) -> Tensor:
    """Return 1 / b per KV head and channel: queries are multiplied by it, keys divided.

    Args:
        q: (Hq, Q, D) after RoPE, query heads grouped by KV head.
        k: (Hkv, T, D) after RoPE.
        tie_pairs: Give both channels of a rotation pair (c, c + D / 2) the same factor, so that it commutes with RoPE.

    Returns:
        (Hkv, D) float32, as `PackedRegions.balance` takes it.
    """
    most_q = q.float().abs().amax(1).view(k.shape[0], -1, k.shape[2]).amax(1)
    most_k = k.float().abs().amax(1)
    if tie_pairs:
        most_q, most_k = (t.view(len(t), 2, -1).amax(1).repeat(1, 2) for t in (most_q, most_k))
    b = torch.sqrt(most_q / most_k.clamp(min=torch.finfo(torch.float32).tiny)).clamp(LEAST, MOST)
    return 1.0 / b
