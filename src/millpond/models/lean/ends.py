"""Embeddings and a head that are in memory only in part: rows when they are looked up, tiles while they multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from millpond.kernels.quantized_weight import QuantizedWeight, Weight

#: A linear layer: rows (N, k), weight (n, k) and bias (n,) or None to (N, n).
Multiply = Callable[[Tensor, Weight, Tensor | None], Tensor]


class EmbeddingSource(Protocol):
    """Embeddings of which only the rows that are looked up are read.

    Attributes:
        dtype: of the rows.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def __len__(self) -> int: ...

    def take(self, ids: Tensor) -> Tensor:
        """Rows `ids` (N,) as numbers: (N, width)."""
        ...


class HeadSource(Protocol):
    """A head whose matrix comes in tiles of some rows."""

    def product(self, x: Tensor, bias: Tensor | None, multiply: Multiply) -> Tensor:
        """(N, vocabulary) of rows x (N, width), each tile multiplied by `multiply`."""
        ...


#: Embeddings or a head that are no parameters of the model: in codes, or read while they are used.
EndMatrix = QuantizedWeight | EmbeddingSource | HeadSource
