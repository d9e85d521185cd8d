"""Shape of the entries that a model stores of a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.cache.chunks.variant import ChunkVariant


@dataclass(frozen=True, slots=True)
class StoredShape:
    """What the variants of one model have in common.

    Attributes:
        mark: tells the model, its weights and its dtype from others. dtype: of keys and values.
        layers: (n_kv_heads, key_dim, value_dim) of each layer.
    """

    mark: str
    dtype: torch.dtype
    layers: tuple[tuple[int, int, int], ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(heads * (key + value) for heads, key, value in self.layers) * self.dtype.itemsize + 4

    def fits(self, variant: ChunkVariant) -> bool:
        """Whether all tensors of a variant have these shapes and this dtype."""
        n, kv = variant.facts.n_tokens, (*variant.keys, *variant.values)
        if variant.scores.shape != (n,) or not len(variant.keys) == len(variant.values) == len(self.layers):
            return False
        sizes = [(heads, n, key) for heads, key, _ in self.layers] + [(heads, n, v) for heads, _, v in self.layers]
        return all(t.shape == size and t.dtype == self.dtype for t, size in zip(kv, sizes, strict=True))
