"""Description of a transformers model as a `Decoder`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.errors import UnsupportedModelError
from millpond.kernels.quantized_weight import Weight
from millpond.models.lean.block import Block
from millpond.models.lean.decoder import BlockSource, Decoder, StreamedBlocks
from millpond.models.lean.ends import HeadSource
from millpond.models.lean.fuse import fusable, own, together
from millpond.models.lean.layers import block_of, norm_of
from millpond.models.lean.mapped import Mapped
from millpond.models.lean.watch import Watch

_LLAMA = {"embed_tokens", "layers", "norm", "rotary_emb"}
_NEOX = {"embed_in", "layers", "final_layer_norm", "rotary_emb"}
_OPT = {"embed_tokens", "embed_positions", "layers"}
_OPT_MAY_HAVE = {"project_in", "project_out", "final_layer_norm"}
#: Modules that do nothing to a model that does not train.
_SILENT = {"emb_dropout"}


@dataclass(frozen=True, slots=True)
class Described:
    """A model without its modules.

    Attributes:
        decoder: runs it. watch: whether the modules are still what they were. layers: the modules of the layers.
    """

    decoder: Decoder
    watch: Watch
    layers: tuple[nn.Module, ...]


def describe(model: PreTrainedModel, streamed: StreamedBlocks | None = None) -> Described:
    """Read the parts of a model, fuse the weights that read the same rows and move the others: see `fuse`.

    That the decoder computes what the model does is for the caller to try out.

    Args:
        streamed: its layers where their weights come and go; no weight is moved then.

    Raises:
        UnsupportedModelError: the model is not built as Llama, Mistral, Qwen2, Qwen3, OPT or GPT-NeoX; it is unchanged.
    """
    whole: Any = model
    base = whole.base_model
    base = getattr(base, "decoder", base)
    head = whole.get_output_embeddings()
    known = {model.base_model_prefix, "lm_head"}
    if type(head) is not nn.Linear or {name for name, _ in model.named_children()} != known:
        raise UnsupportedModelError(f"{type(model).__name__} has more than a decoder and one linear layer behind it")
    ends = _ends(base)
    found = [block_of(layer, fusable) for layer in base.layers]
    if streamed is None:
        _check_weights(model)
        blocks: BlockSource = _fused(model, base.layers, found)
    else:
        blocks = tuple(streamed) if streamed.resident else streamed
    matrix: Weight | HeadSource = head.weight
    if streamed is not None:
        matrix = matrix if streamed.head is None else streamed.head
        ends["tokens"] = ends["tokens"] if streamed.tokens is None else streamed.tokens
    decoder = Decoder(blocks=blocks, head=(matrix, head.bias), **ends)
    layers = tuple(base.layers)
    # the model's own settings and those of its rotary embedding change as it runs
    watch = Watch(model.modules(), settings=[module for layer in layers for module in layer.modules()])
    return Described(decoder, watch, layers)


def _fused(model: nn.Module, layers: Iterable[nn.Module], found: Iterable[Block]) -> tuple[Block, ...]:
    """The layers with fused weights; the others are moved."""
    several = (taken.parts for block in found for taken in (block.qkv, block.up) if len(taken.parts) > 1)
    fused = [weight for parts in several for part in parts for weight in part if isinstance(weight, Tensor)]
    mapped, blocks = Mapped(model.parameters()), []
    for layer in layers:
        with mapped.moving(layer.parameters()):
            own(layer.modules(), but=fused)
            blocks.append(block_of(layer, together))
    with mapped.moving(model.parameters()):
        own(model.modules(), but=fused)
    return tuple(blocks)


def _ends(base: Any) -> dict[str, Any]:
    """What stands before and after the layers."""
    names = {name for name, _ in base.named_children()} - _SILENT
    if names == _LLAMA:
        return {"tokens": base.embed_tokens.weight, "rotary": base.rotary_emb, "norm": norm_of(base.norm)}
    if names == _NEOX:
        return {"tokens": base.embed_in.weight, "rotary": base.rotary_emb, "norm": norm_of(base.final_layer_norm)}
    if names - _OPT_MAY_HAVE == _OPT:
        return {
            "tokens": base.embed_tokens.weight,
            "positions": base.embed_positions.weight,
            "offset": int(base.embed_positions.offset),
            "project_in": _weight(base.project_in),
            "project_out": _weight(base.project_out),
            "norm": None if base.final_layer_norm is None else norm_of(base.final_layer_norm),
        }
    raise UnsupportedModelError(f"{type(base).__name__} has parts of its own: {', '.join(sorted(names))}")


def _weight(module: nn.Linear | None) -> Tensor | None:
    return None if module is None else module.weight


def _check_weights(model: nn.Module) -> None:
    """
    Raises:
        UnsupportedModelError: the weights are of several dtypes or devices, are not loaded, or layers share them.
    """
    weights = [w for layer in model.modules() if isinstance(layer, nn.Linear) for w in layer._parameters.values()]
    found = {(w.dtype, w.device) for w in model.parameters()}
    if len(found) != 1 or next(iter(found))[1].type == "meta":
        raise UnsupportedModelError("the weights are of several dtypes or devices, or not loaded")
    if max(Counter(id(w) for w in weights if w is not None).values()) > 1:
        raise UnsupportedModelError("layers share their weights")
