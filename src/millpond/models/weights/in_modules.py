"""Modules of a model that compute with matrices in codes, or that are read while they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from millpond.kernels.linear import BLOCK
from millpond.kernels.quantized_weight import QuantizedWeight, Weight
from millpond.models.lean.ends import EmbeddingSource, EndMatrix, HeadSource


@contextmanager
def computing_with(matrices: Iterable[tuple[Any, EndMatrix]]) -> Iterator[None]:
    """Linear layers and embeddings compute with the numbers that these matrices stand for, by torch.

    Args:
        matrices: modules, each with its matrix.
    """
    changed: list[Any] = []
    try:
        for module, matrix in matrices:
            forward: Callable[..., Tensor] = _embedding if isinstance(module, nn.Embedding) else _linear
            changed.append(module)
            module.forward = partial(forward, module, matrix)
        yield
    finally:
        for module in changed:
            del module.forward


def _linear(module: nn.Linear, matrix: QuantizedWeight | HeadSource, x: Tensor) -> Tensor:
    if isinstance(matrix, QuantizedWeight):
        return _multiply(x, matrix, module.bias)
    return matrix.product(x.flatten(0, -2), module.bias, _multiply).view(*x.shape[:-1], -1)


def _embedding(module: nn.Embedding, matrix: QuantizedWeight | EmbeddingSource, ids: Tensor) -> Tensor:
    return matrix.take(ids.flatten()).view(*ids.shape, -1)


def _multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """The outcome of a linear layer by torch; of codes in float32, some rows of the matrix at a time."""
    if isinstance(weight, Tensor):
        return functional.linear(x, weight, bias)
    step, wide = max(1, BLOCK // weight.shape[1]), x.float()
    matrices = (weight.rows(begin, begin + step).widen(torch.float32) for begin in range(0, len(weight), step))
    found = torch.cat([functional.linear(wide, matrix) for matrix in matrices], -1)
    return (found if bias is None else found + bias).to(x.dtype)
