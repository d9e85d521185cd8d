"""The matrices of a decoder in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.kernels.decoder_ops import GatedActivation, Norm, Projection
from millpond.kernels.quantized_weight import GROUP, QuantizedWeight
from millpond.models.lean.block import Block
from millpond.models.lean.decoder import Decoder
from millpond.models.lean.fuse import as_one, fusable
from millpond.models.lean.layers import Take


def quantized(decoder: Decoder, bits: int) -> Decoder:
    """The same decoder, the matrices of its layers and its head in codes; embeddings too where the head shares them.

    Norms, biases, learned positions and what stands between embeddings and layers stay as they are.

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
    """Empty the matrices of a model's modules, which then cannot run, besides what the decoder reads."""
    kept = [but.tokens, but.positions, but.project_in, but.project_out]
    there = {id(one) for one in kept if one is not None}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and id(weight) not in there:
            weight.data = weight.data.new_empty(0)


def code_bytes(decoder: Decoder) -> int:
    """Bytes of its matrices in codes."""
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
    whole = weights[0] if len(weights) == 1 else torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    assert isinstance(whole, Tensor), "checked before"
    bias = projection.whole[1] if projection.whole is not None else _joined(projection)
    return _in_codes(projection, QuantizedWeight.quantize(whole, bits), bias)


def take_codes(codes: Mapping[int, QuantizedWeight]) -> Take:
    """How linear layers are taken whose matrices are codes already.

    Args:
        codes: of each layer, by the id of its weight, which has only a shape.
    """

    def take(layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None) -> Projection:
        found = fusable(layers, norm, act)
        weights = [codes[id(layer.weight)] for layer in layers]
        parts = tuple((weight, layer.bias) for weight, layer in zip(weights, layers, strict=True))
        whole = _in_one(weights)
        return replace(found, parts=parts, whole=None if whole is None else (whole, _joined(found)))

    return take


def _in_one(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Matrices that lie one after another as one of them; None where they do not, or some have other codes."""
    if len({weight.bits for weight in weights}) > 1:
        return None
    codes, scales = as_one([weight.codes for weight in weights]), as_one([weight.scales for weight in weights])
    return None if codes is None or scales is None else replace(weights[0], codes=codes, scales=scales)


def _in_codes(projection: Projection, whole: QuantizedWeight, bias: Tensor | None) -> Projection:
    """The projection with the matrices of its parts in codes, one after another in `whole`."""
    parts, begin = [], 0
    for weight, own in projection.parts:
        parts.append((whole.rows(begin, begin + len(weight)), own))
        begin += len(weight)
    return replace(projection, parts=tuple(parts), whole=(whole, bias))


def _joined(projection: Projection) -> Tensor | None:
    """The biases one after another; None where there is none."""
    biases = [bias for _, bias in projection.parts if bias is not None]
    if not biases:
        return None
    together = as_one(biases)
    return torch.cat(biases) if together is None else together
