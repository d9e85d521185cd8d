"""Fixture F6: one head, six tokens, logits L[i, j] = ((3 i + 5 j) mod 7) / 2, and a way to run a policy on it."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.pool import PagePool
from millpond.cache.state.positions import PositionTracker
from millpond.kernels.args import AttentionShape
from millpond.policy.policy import Policy

N = 6
LOGITS = torch.tensor([[((3 * i + 5 * j) % 7) / 2 for j in range(N)] for i in range(N)], dtype=torch.float64)

#: Rows of the causal softmax, worked by hand to six places.
ROWS = [
    [1.0],
    [0.731059, 0.268941],
    [0.665241, 0.244728, 0.090031],
    [0.133364, 0.049062, 0.597695, 0.219880],
    [0.266066, 0.097880, 0.036008, 0.438669, 0.161377],
    [0.036619, 0.446106, 0.164113, 0.060374, 0.022210, 0.270577],
]
COLUMN_SUMS = [2.832348, 1.106718, 0.887847, 0.718922, 0.183587, 0.270577]


def make_layer_cache(policy: Policy, budget: int, slots: int = 8) -> LayerCache:
    """A cache of one layer with a fixed budget."""
    pools: dict[str, PagePool] = {}

    def pool(key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> PagePool:
        made = PagePool(key_dim, value_dim, dtype, device, slots=slots, masses=policy.mass_bias)
        return pools.setdefault("one", made)

    return LayerCache(0, policy, lambda *of: budget, pool, PositionTracker())


def feed(cache: LayerCache, logits: Tensor, first: int, last: int) -> Tensor:
    """Run tokens first..last-1 of a text whose logits are given, (H, N, N) for H heads (group 1)."""
    n = logits.shape[-1]
    q = logits[None, :, first:last]
    k = torch.eye(n, dtype=logits.dtype)[None, None, first:last].expand(1, logits.shape[0], -1, -1)
    return cache.attend(q, k, k, None, AttentionShape(scale=1.0))


def kept(cache: LayerCache, head: int = 0) -> list[int]:
    """Positions that the cache holds."""
    return [p for p in cache.read(0).positions[head].tolist() if p >= 0]


def run(policy: Policy, budget: int) -> list[int]:
    """Positions kept after the whole fixture as one prompt."""
    cache = make_layer_cache(policy, budget)
    feed(cache, LOGITS[None], 0, N)
    return kept(cache)
