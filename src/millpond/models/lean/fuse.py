"""Fusion of linear layers with the same input: joined weights, without a second copy.

`own` moves what is not fused, so that the file that a model was loaded from need not stay in memory too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.kernels.decoder_ops import Norm, Projection
from millpond.kernels.decoder_rows import GatedActivation


def together(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
    """What some layers do to the same rows, fused: their parameters become views of one tensor.

    What the parameters hold does not change, and new values written into them are seen. Layers that lie after each
    other already stay where they are.

    Raises:
        UnsupportedModelError: as `fusable`.
    """
    found = fusable(layers, norm, act)
    weights = [weight for weight, _ in found.parts if isinstance(weight, Tensor)]
    biases = [bias for _, bias in found.parts if bias is not None]
    return replace(found, whole=(_behind_each_other(weights), _behind_each_other(biases) if biases else None))


def fusable(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
    """As `apart`, of layers that can be fused.

    Raises:
        UnsupportedModelError: only some of the layers have a bias.
    """
    if sum(layer.bias is not None for layer in layers) not in (0, len(layers)):
        raise UnsupportedModelError("of layers that read the same rows only some have a bias")
    return apart(layers, norm, act)


def apart(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
    """What some layers do to the same rows, their weights where they are."""
    parts = tuple((layer.weight, layer.bias) for layer in layers)
    return Projection(parts, parts[0] if len(parts) == 1 else None, norm, act)


def in_place(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
    """What some layers do to the same rows, fused only if their weights lie one after another already.

    Raises:
        UnsupportedModelError: as `fusable`.
    """
    found = fusable(layers, norm, act)
    weights = [weight for weight, _ in found.parts if isinstance(weight, Tensor)]
    biases = [bias for _, bias in found.parts if bias is not None]
    weight, bias = as_one(weights), as_one(biases) if biases else None
    if weight is None or (biases and bias is None):
        return found
    return replace(found, whole=(weight, bias))


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one after another as one of them; None where they do not."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != at:
            return None
        at += part.numel()
    return first.detach().as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def _behind_each_other(parts: Sequence[Tensor]) -> Tensor:
    whole = as_one(parts)
    if whole is not None:
        return whole
    first = parts[0]
    whole = torch.empty((sum(len(part) for part in parts), *first.shape[1:]), dtype=first.dtype, device=first.device)
    begin = 0
    for part in parts:
        place = whole[begin : begin + len(part)]
        place.copy_(part.detach())
        part.data = place
        begin += len(part)
    return whole


#: Where the weights of modules lie that were moved, by name.
_moved: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()


def own(modules: Iterable[nn.Module], but: Iterable[Tensor | None]) -> None:
    """Move the weights of modules on the CPU into memory of their own, once; not those that `together` will move.

    A model that was loaded from safetensors reads its weights out of the mapped file, which stays as long as one of
    them does, and whose pages are never huge ones.
    """
    there = {id(weight) for weight in but}
    for module in modules:
        for name, weight in module._parameters.items():
            if weight is None or not weight.is_cpu or id(weight) in there:
                continue
            there.add(id(weight))
            places = _moved.setdefault(module, {})
            if places.get(name) != weight.data_ptr():
                weight.data = weight.detach().clone(memory_format=torch.contiguous_format)
                places[name] = weight.data_ptr()
