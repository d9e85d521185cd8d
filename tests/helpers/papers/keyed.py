"""Views and one-layer caches whose keys and values a test gives."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.kernels.args import AttentionShape
from millpond.policy.policy import Policy
from millpond.policy.view import View
from tests.helpers.papers.fixture import kept, make_layer_cache


def view(
    keys: Tensor,
    values: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    signal: Tensor | None = None,
    seen: int = 0,
    pinned: Tensor | None = None,
) -> View:
    """A view of keys (H, N, D), by default at positions 0, 1, ..., which shows what is given."""
    if positions is None:
        positions = torch.arange(keys.shape[1], dtype=torch.int32).expand(len(keys), -1)
    parts = {"keys": keys, "values": values}

    def read(part: str) -> Tensor:
        found = parts[part]
        assert found is not None, f"the score must not ask for the {part}"
        return found

    return View(positions, signal, seen or keys.shape[1], layer=0, pinned=pinned, read_entries=read)


def text(heads: int = 2, n: int = 40, dim: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v (heads, n, dim) in float64, with keys that differ in length and share a direction."""
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(heads, n, dim, generator=make, dtype=torch.float64) for _ in range(3))
    return q, (k + 1) * torch.rand(heads, n, 1, generator=make, dtype=torch.float64), v


def run(policy: Policy, budget: int, q: Tensor, k: Tensor, v: Tensor, prompt: int = 0) -> LayerCache:
    """The cache of one layer after a prompt (by default all) and single steps behind it."""
    cache = make_layer_cache(policy, budget)
    n = k.shape[1]
    prompt = prompt or n
    for first, last in [(0, prompt), *((t, t + 1) for t in range(prompt, n))]:
        cache.attend(q[None, :, first:last], k[None, :, first:last], v[None, :, first:last], None, AttentionShape(1.0))
    return cache


def sets(cache: LayerCache) -> list[list[int]]:
    """Kept positions per head."""
    return [kept(cache, head) for head in range(int(cache.stored.shape[1]))]


def best(value: list[float], count: int, always: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    """The `count` positions of highest value, ties to the newest, `always` first; worked without the package."""
    order = sorted(range(len(value)), key=lambda j: (j not in always, -value[j], -j))
    return sorted(order[:count])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / (float(a @ a) * float(b @ b)) ** 0.5
