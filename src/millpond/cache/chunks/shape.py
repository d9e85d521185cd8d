"""Shape of the entries that a model stores of a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.cache.chunks.rest_format import RestFormat, RestName


@dataclass(frozen=True, slots=True)
class StoredShape:
    """What the variants of one model have in common.

    Attributes:
        model: tells the model, its weights and its dtype from others. dtype: of its keys and values.
        layers: (n_kv_heads, key_dim, value_dim) of each layer. rest: the format in which a store keeps them.
    """

    model: str
    dtype: torch.dtype
    layers: tuple[tuple[int, int, int], ...]
    rest: RestName = "auto"

    @property
    def format(self) -> RestFormat:
        """In which keys and values are kept."""
        return RestFormat(self.rest, self.dtype)

    @property
    def mark(self) -> str:
        """Tells files of this model in this format from others."""
        return self.model if self.rest == "auto" else f"{self.model}-{self.rest}"

    def nbytes(self, n_tokens: int) -> int:
        """Bytes of a variant of so long a chunk."""
        tensors = self._tensors(n_tokens)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors.values())

    def fits(self, n_tokens: int, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are the tensors of a variant, all of the right shapes and dtypes."""
        return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == self._tensors(n_tokens)

    def sides(self) -> Iterator[tuple[str, int, int, bool]]:
        """Name, heads, dim and whether they are keys, of the keys and the values of each layer."""
        for layer, (heads, key_dim, value_dim) in enumerate(self.layers):
            yield f"keys.{layer}", heads, key_dim, True
            yield f"values.{layer}", heads, value_dim, False

    def _tensors(self, n: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"scores": ((n,), torch.float32)}
        for name, heads, dim, is_key in self.sides():
            tensors |= {
                name + suffix: (shape, dtype) for suffix, shape, dtype in self.format.parts(heads, n, dim, is_key)
            }
        return tensors
