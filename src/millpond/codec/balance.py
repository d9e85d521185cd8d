"""The outlier-aware balancer of MiKV ("No Token Left Behind", Yang et al., 2024, arXiv:2402.18096).

Keys with large channels lose most to few bits per token. Each channel is scaled so that queries and keys peak alike,
b_c = sqrt(max_t |q_tc| / max_t |k_tc|): keys are stored times b, queries meet them divided by b.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bounds of b: a channel that is zero on one side must not blow up the other.
LEAST, MOST = 1e-2, 1e2


def query_balance(q: Tensor, k: Tensor, *, tie_pairs: bool = False) -> Tensor:
    """1 / b per KV head and channel: the factor of the query, whose inverse the keys are stored with.

    Args:
        q: (Hq, Q, D) and k: (Hkv, T, D), both after RoPE; query heads grouped by KV head.
        tie_pairs: give both channels of a rotation pair (c, c + D / 2) the same factor, so that it commutes with RoPE.

    Returns:
        (Hkv, D) float32, as `PackedRegions.balance` takes it.
    """
    most_q = q.float().abs().amax(1).view(k.shape[0], -1, k.shape[2]).amax(1)
    most_k = k.float().abs().amax(1)
    if tie_pairs:
        most_q, most_k = (t.view(len(t), 2, -1).amax(1).repeat(1, 2) for t in (most_q, most_k))
    b = torch.sqrt(most_q / most_k.clamp(min=torch.finfo(torch.float32).tiny)).clamp(LEAST, MOST)
    return 1.0 / b
