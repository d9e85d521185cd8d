"""Fusion of linear layers with the same input, without a second copy, and their matrices in 4 or 8 bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.kernels import native
from millpond.kernels.decoder_ops import GatedActivation, Norm, Projection
from millpond.kernels.quantized_weight import GROUP, QuantizedWeight
from millpond.models.lean.block import Block
from millpond.models.lean.decoder import Decoder
from millpond.models.lean.layers import Take

#: Matrices of a layer that come to less are allocated one by one, in pages of the usual size.
MIN_IN_ONE = 2**22
#: Bytes of a cache line, at which each matrix begins.
_LINE = 64


class Room:
    """Memory for matrices that are read as a whole, in huge pages if the system has them.

    Args:
        matrices: Matrices that may be moved into it. Those on another device, or of few bytes, are allocated one by
            one.
    """

    def __init__(self, matrices: Iterable[Tensor]) -> None:
        nbytes = sum(_in_lines(matrix.nbytes) for matrix in matrices if matrix.is_cpu)
        self._left = nbytes if nbytes >= MIN_IN_ONE else 0
        self._memory: Tensor | None = None

    def take(self, n: int, like: Tensor) -> Tensor:
        """Return (n, ...) uninitialized, with dtype, device and other sizes of `like`."""
        shape = (n, *like.shape[1:])
        nbytes = n * like[:1].nbytes
        if like.ndim < 2 or not like.is_cpu or nbytes > self._left:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        if self._memory is None:
            self._memory = torch.empty(self._left, dtype=torch.uint8)
            native.use_huge_pages([self._memory])
        begin = len(self._memory) - self._left
        self._left -= _in_lines(nbytes)
        return self._memory[begin : begin + nbytes].view(like.dtype).view(shape)


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def together(
    layers: Sequence[nn.Linear],
    norm: Norm | None = None,
    act: GatedActivation | None = None,
    *,
    room: Room | None = None,
) -> Projection:
    """Return layers of the same input, fused: their parameters become views of one tensor.

    The parameters keep their numbers, and new values written into them are seen. Layers that are already next to each
    other stay where they are.

    Args:
        layers: Linear layers with the same input.
        norm: Norm before them.
        act: Gated activation after them.
        room: Memory of the fused matrix; None for any.

    Raises:
        UnsupportedModelError: as `fusable`.
    """
    fused = fusable(layers, norm, act)
    weights = [weight for weight, _ in fused.parts if isinstance(weight, Tensor)]
    biases = [bias for _, bias in fused.parts if bias is not None]
    room = Room([]) if room is None else room
    bias = _behind_each_other(biases, room) if biases else None
    return replace(fused, whole=(_behind_each_other(weights, room), bias))


def fusable(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
    """Return layers as `apart` does, checked to be fusable.

    Raises:
        UnsupportedModelError: only some of the layers have a bias.
    """
    if sum(layer.bias is not None for layer in layers) not in (0, len(layers)):
        raise UnsupportedModelError("of layers that read the same rows only some have a bias")
    return apart(layers, norm, act)


def apart(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
    """Return layers of the same input as one projection, weights where they are."""
    parts = tuple((layer.weight, layer.bias) for layer in layers)
    return Projection(parts, parts[0] if len(parts) == 1 else None, norm, act)


def in_place(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
    """Return layers of the same input, fused only if their weights are already adjacent.

    Raises:
        UnsupportedModelError: as `fusable`.
    """
    fused = fusable(layers, norm, act)
    weights = [weight for weight, _ in fused.parts if isinstance(weight, Tensor)]
    biases = [bias for _, bias in fused.parts if bias is not None]
    weight, bias = as_one(weights), as_one(biases) if biases else None
    if weight is None or (biases and bias is None):
        return fused
    return replace(fused, whole=(weight, bias))


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return adjacent tensors as one of them, or None if they are not adjacent."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != at:
            return None
        at += part.numel()
    return first.detach().as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def _behind_each_other(parts: Sequence[Tensor], room: Room) -> Tensor:
    joined = as_one(parts)
    if joined is not None:
        return joined
    joined = room.take(sum(len(part) for part in parts), parts[0])
    begin = 0
    for part in parts:
        place = joined[begin : begin + len(part)]
        place.copy_(part.detach())
        part.data = place
        begin += len(part)
    return joined


#: Where the weights of modules lie that were moved, by name.
_moved: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()


def own(
    modules: Iterable[nn.Module],
    but: Iterable[Tensor | None],
    room: Room | None = None,
    copy: Callable[[Tensor, Tensor], Tensor] = lambda old, new: new.copy_(old),
) -> None:
    """Move the weights of modules on the CPU into memory of their own, once, except `but`.

    A model that was loaded from safetensors reads its weights out of the mapped file, which stays as long as one of
    them does, and whose pages are never huge ones.

    Args:
        modules: Modules whose weights move.
        but: Weights that stay.
        room: Memory of matrices; None for each in one of its own.
        copy: Copies a matrix: copy(old, new) -> new.
    """
    excluded = {id(weight) for weight in but}
    for module in modules:
        for name, weight in module._parameters.items():
            if weight is None or not weight.is_cpu or id(weight) in excluded:
                continue
            excluded.add(id(weight))
            places = _moved.setdefault(module, {})
            if places.get(name) != weight.data_ptr():
                old = weight.detach()
                place = Room([old]) if room is None else room
                weight.data = old.clone() if old.ndim < 2 else copy(old, place.take(len(old), old))
                places[name] = weight.data_ptr()


def quantized(decoder: Decoder, bits: int) -> Decoder:
    """Return the decoder with the matrices of its layers and its head in codes.

    Embeddings are in codes if the head shares them. Norms, biases, learned positions and the projections between
    embeddings and layers stay as they are.

    Raises:
        UnsupportedModelError: a matrix has rows of no whole groups, or does not lie on a CPU.
        OptionError: a number is not finite, or beyond float16.
    """
    _check(decoder)
    head, bias = decoder.head
    packed = QuantizedWeight.quantize(head, bits)  # type: ignore[arg-type]
    return replace(
        decoder,
        blocks=tuple(_block(block, bits) for block in decoder.blocks),
        head=(packed, bias),
        tokens=packed if decoder.tokens is head else decoder.tokens,
    )


def release(model: nn.Module, but: Decoder) -> None:
    """Empty the matrices of a model's modules, which then cannot run, except the decoder's."""
    kept_matrices = [but.tokens, but.positions, but.project_in, but.project_out]
    kept_ids = {id(matrix) for matrix in kept_matrices if matrix is not None}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and id(weight) not in kept_ids:
            weight.data = weight.data.new_empty(0)


def code_bytes(decoder: Decoder) -> int:
    """Return bytes of its matrices in codes."""
    return sum(weight.nbytes for _, weight in _matrices(decoder) if isinstance(weight, QuantizedWeight))


def _check(decoder: Decoder) -> None:
    for name, weight in _matrices(decoder):
        if isinstance(weight, QuantizedWeight) or not QuantizedWeight.fits(weight) or not weight.is_cpu:
            raise UnsupportedModelError(
                f"{name} {tuple(weight.shape)} cannot be quantized: codes are of groups of {GROUP} numbers of a row, "
                "and run on a CPU; leave out weights="
            )


def _matrices(decoder: Decoder) -> Iterable[tuple[str, Tensor | QuantizedWeight]]:
    head, _ = decoder.head
    assert isinstance(head, Tensor | QuantizedWeight), "a model in memory"
    yield "the head", head
    for block in decoder.blocks:
        for projection in (block.qkv, block.out, block.up, block.down):
            for weight, _ in projection.parts:
                yield f"a matrix of layer {block.index}", weight


def _block(block: Block, bits: int) -> Block:
    return replace(
        block,
        qkv=_projection(block.qkv, bits),
        out=_projection(block.out, bits),
        up=_projection(block.up, bits),
        down=_projection(block.down, bits),
    )


def _projection(projection: Projection, bits: int) -> Projection:
    weights = [weight for weight, _ in projection.parts]
    matrix = (
        weights[0] if len(weights) == 1 else torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    )
    assert isinstance(matrix, Tensor), "checked before"
    bias = projection.whole[1] if projection.whole is not None else _joined(projection)
    return _in_codes(projection, QuantizedWeight.quantize(matrix, bits), bias)


def take_codes(codes: Mapping[int, QuantizedWeight]) -> Take:
    """Return a way to take linear layers whose matrices are codes already.

    Args:
        codes: Codes of each layer, by the id of its weight, which has only a shape.
    """

    def take(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
        fused = fusable(layers, norm, act)
        weights = [codes[id(layer.weight)] for layer in layers]
        parts = tuple((weight, layer.bias) for weight, layer in zip(weights, layers, strict=True))
        joined = _in_one(weights)
        return replace(fused, parts=parts, whole=None if joined is None else (joined, _joined(fused)))

    return take


def _in_one(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Return adjacent matrices in codes as one, or None if they are not adjacent or alike."""
    if len({weight.bits for weight in weights}) > 1:
        return None
    codes, scales = as_one([weight.codes for weight in weights]), as_one([weight.scales for weight in weights])
    return None if codes is None or scales is None else replace(weights[0], codes=codes, scales=scales)


def _in_codes(projection: Projection, joined: QuantizedWeight, bias: Tensor | None) -> Projection:
    """Return the projection with its parts' matrices in codes, adjacent in `joined`."""
    parts, begin = [], 0
    for weight, own_bias in projection.parts:
        parts.append((joined.rows(begin, begin + len(weight)), own_bias))
        begin += len(weight)
    return replace(projection, parts=tuple(parts), whole=(joined, bias))


def _joined(projection: Projection) -> Tensor | None:
    """Return the biases, joined; None if there are none."""
    biases = [bias for _, bias in projection.parts if bias is not None]
    if not biases:
        return None
    together = as_one(biases)
    return torch.cat(biases) if together is None else together
