"""Records queries, keys and values of each layer of a cache, to recompute its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.cache.layer.latent_cache import LatentCache
from millpond.errors import UnsupportedModelError
from millpond.hf.cache import MillpondCache
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.decode_rules import Reduce


@dataclass(frozen=True, slots=True)
class RecordedAttention:
    """What went through one layer for one sequence of N tokens: every key and value, and the newest m queries.

    Attributes:
        q: (Hq, m, key_dim), of the positions N - m to N - 1. k: (Hkv, N, key_dim). v: (Hkv, N, value_dim).
        shape: of the layer's attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    shape: AttentionShape

    @property
    def first(self) -> int:
        """The position of the first query."""
        return self.k.shape[1] - self.q.shape[1]

    def received(self, since: int) -> Tensor:
        """(Hkv, N) float32: the attention that the queries at positions >= `since` pay to each position.

        sum_i sum_h A[h, i, j] over these queries i and the query heads h of each KV head, in full attention.
        """
        q = self.q[:, max(since - self.first, 0) :]
        n, m = self.k.shape[1], q.shape[1]
        if m == 0:
            return torch.zeros(self.k.shape[:2], device=self.k.device)
        positions = torch.arange(n, dtype=torch.int32, device=self.k.device)
        past = positions[None, : n - m] if m < n else None
        args = PrefillArgs(q, self.k, self.v, positions[n - m :], self.shape, past, colsum=Reduce.SUM)
        sums = ops.prefill(args).colsum
        assert sums is not None, "column sums were requested"
        return sums


@dataclass(frozen=True, slots=True)
class _Pass:
    q: Tensor | None
    k: Tensor
    v: Tensor
    mask: Tensor | None


class AttentionRecorder:
    """Watches a cache from its first pass on; the cache must not change its rows meanwhile.

    Attributes:
        asking: whether the queries of the passes to come are written down too, not only their keys and values.

    Raises:
        UnsupportedModelError: the model caches latents.
    """

    def __init__(self, cache: MillpondCache, asking: bool = True) -> None:
        if any(isinstance(layer_cache, LatentCache) for layer_cache in cache.layer_caches):
            raise UnsupportedModelError(
                "the model caches latents (MLA): what each of its heads attends to cannot be worked out from them"
            )
        self.asking = asking
        self._passes: dict[int, list[_Pass]] = {}
        self._shapes: dict[int, AttentionShape] = {}
        cache.watch(self._see)

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that were seen."""
        return sorted(self._passes)

    def _see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
        seen = None if mask is None else mask[:, -k.shape[2] :].bool()
        self._passes.setdefault(layer, []).append(_Pass(q if self.asking else None, k, v, seen))
        self._shapes[layer] = shape

    def traffic(self, layer: int, row: int) -> RecordedAttention:
        """What went through one layer for one row, without pads."""
        passes = self._passes[layer]
        k = torch.cat([_own(p.k, p.mask, row) for p in passes], 1)
        v = torch.cat([_own(p.v, p.mask, row) for p in passes], 1)
        n_heads, key_dim = passes[-1].k.shape[1], k.shape[-1]
        asked = [_own(p.q, p.mask, row) for p in passes if p.q is not None]
        q = torch.cat(asked, 1) if asked else k.new_zeros(n_heads, 0, key_dim)
        return RecordedAttention(q, k, v, self._shapes[layer])


def _own(x: Tensor, mask: Tensor | None, row: int) -> Tensor:
    """The columns (H, n, D) of one row that hold tokens."""
    return x[row] if mask is None else x[row][:, mask[row]]
