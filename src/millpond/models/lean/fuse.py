"""together: linear layers that read the same rows, their weights behind each other without a second copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.kernels.dense import Matrices


def together(layers: Sequence[nn.Linear]) -> Matrices:
    """The matrices of some layers, fused: their parameters become views of one tensor.

    What the parameters hold does not change, and new values written into them are seen. Layers that lie behind each
    other already stay where they are.

    Raises:
        UnsupportedModelError: only some of the layers have a bias.
    """
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]
    if len(biases) not in (0, len(layers)):
        raise UnsupportedModelError("of layers that read the same rows only some have a bias")
    whole = _behind_each_other(weights), _behind_each_other(biases) if biases else None
    return Matrices(tuple((layer.weight, layer.bias) for layer in layers), whole)


def apart(layers: Sequence[nn.Linear]) -> Matrices:
    """The matrices of some layers, where they are."""
    parts = tuple((layer.weight, layer.bias) for layer in layers)
    return Matrices(parts, parts[0] if len(parts) == 1 else None)


def _behind_each_other(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != at:
            break
        at += part.numel()
    else:
        return first.detach().as_strided(shape, first.stride())
    whole = torch.empty(shape, dtype=first.dtype, device=first.device)
    begin = 0
    for part in parts:
        place = whole[begin : begin + len(part)]
        place.copy_(part.detach())
        part.data = place
        begin += len(part)
    return whole
