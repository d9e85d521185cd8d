"""use_lean_layers: while a model decodes on a CPU, run a decoder layer in a few native calls.

A step of decoding spends more time between the operations of a layer (norms, rotary embedding, gates: some fifty small
ones) than in its attention. Where a layer is built as Llama's is, the same arithmetic takes three calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from millpond.errors import UnsupportedModelError
from millpond.hf.attention import attention
from millpond.hf.linears import STAND_IN as LINEARS
from millpond.hf.stand_in import StandIn
from millpond.kernels import rows
from millpond.kernels.dense import TOLERANCE, choose
from millpond.models.lean.block import Block
from millpond.models.lean.fuse import apart
from millpond.models.lean.layers import block_of
from millpond.models.lean.watch import Watch

#: What a layer says of its attention; the rest of what it passes on is nothing to us.
_SETTINGS = ("scaling", "sliding_window", "softcap", "s_aux", "position_bias")
_WATCH = "millpond_watch"

#: The parts of layers that are switched, and the settings of their attention.
_known: weakref.WeakKeyDictionary[nn.Module, tuple[_Parts, dict[str, Any]]] = weakref.WeakKeyDictionary()


class _Parts(NamedTuple):
    """A layer taken apart."""

    attention: Any
    block: Block
    watch: Watch
    weights: tuple[Tensor | None, ...]


def forward(
    self: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """Stands in for the forward of a decoder layer."""
    parts, settings = _parts_of(self)
    if parts is None or position_embeddings is None or past_key_values is None or not _ready(parts, hidden_states):
        return type(self).forward(
            self, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
        )  # fmt: skip
    return _run(parts, settings, hidden_states, attention_mask, past_key_values, position_embeddings)


STAND_IN = StandIn(forward)


def _parts_of(layer: nn.Module) -> tuple[_Parts | None, dict[str, Any]]:
    """What is known of a layer; taken apart anew where its weights were replaced or moved, so that new ones count."""
    parts, settings = _known.get(layer, (None, {}))
    if parts is not None and not parts.watch.in_place():
        parts = _take_apart(layer)
        if parts is not None:
            _known[layer] = parts, settings
    return parts, settings


def _ready(parts: _Parts, x: Tensor) -> bool:
    """Whether the kernels take this pass, and nothing watches or replaces a module that would not be called."""
    known = parts.attention.config._attn_implementation in AttentionInterface._global_mapping
    return known and rows.fits(x, parts.weights) and parts.watch.quiet()


def _run(
    parts: _Parts,
    settings: dict[str, Any],
    x: Tensor,
    mask: Tensor | None,
    cache: Any,
    embeddings: tuple[Tensor, Tensor],
) -> Tensor:
    """The layer: (B, Q, width) -> (B, Q, width). settings: of its attention, as the layer itself would pass them."""
    module = parts.attention
    batch, length = x.shape[:2]
    together = AttentionInterface._global_mapping[module.config._attn_implementation]

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(batch, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, index)
        out: Tensor = together(module, q, k, v, mask, dropout=0.0, **settings)[0]
        return out.reshape(batch * length, -1)

    cos, sin = (t.expand(batch, length, -1).reshape(batch * length, -1) for t in embeddings)
    wide = x.reshape(batch * length, -1)
    return parts.block.forward(wide, (cos, sin), attend, choose(wide)).view(x.shape)


def use_lean_layers(model: nn.Module) -> Callable[[], None]:
    """Let decoder layers that are built as Llama's is pass few rows (decoding) through native calls.

    A layer is switched if its modules are those of Llama or Qwen3 and a trial gives what its own forward gives. Only
    `forward` is replaced; passes of many rows, with gradients, or with hooks inside the layer take the layer's own.

    Returns:
        What undoes it, once no other caller needs it.
    """
    ours = []
    for module in model.modules():
        parts = _take_apart(module)
        if parts is None:
            continue
        if not STAND_IN.serves(module):
            settings = _try_out(module, parts)
            if settings is None:
                continue
            _known[module] = parts, settings
        ours.append(module)
    return STAND_IN.begin(ours)


def _take_apart(layer: Any) -> _Parts | None:
    """The parts of a decoder layer as Llama has it; None if it is anything else."""
    attn = getattr(layer, "self_attn", None)
    if not hasattr(layer, "input_layernorm") or not hasattr(attn, "config") or not STAND_IN.may_serve(layer):
        return None
    try:
        block = block_of(layer, apart)
    except UnsupportedModelError:
        return None
    inside = [module for module in layer.modules() if module is not layer]
    if not all(LINEARS.may_serve(m) if type(m) is nn.Linear else "forward" not in m.__dict__ for m in inside):
        return None
    return _Parts(attn, block, Watch(inside), tuple(w for m in inside for w in m._parameters.values()))


@torch.no_grad()
def _try_out(layer: Any, parts: _Parts) -> dict[str, Any] | None:
    """The settings that the layer gives its attention, if two random tokens come out of our pass as out of its own."""
    weight, attn = layer.input_layernorm.weight, layer.self_attn
    if not weight.is_cpu or weight.dtype not in TOLERANCE:
        return None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, len(weight), generator=draw).to(weight.dtype)
    angles = torch.rand(1, 2, attn.head_dim // 2, generator=draw).repeat(1, 1, 2) * 6
    embeddings = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if not _ready(parts, x):
        return None
    try:
        own, settings = _watched(layer, x, embeddings)
        found = _run(parts, settings, x, None, None, embeddings)
    except (TypeError, ValueError, RuntimeError):
        return None  # not a layer like Llama's after all
    if not isinstance(own, Tensor) or own.shape != found.shape:
        return None
    error, size = (found - own).abs().max(), (own - x).abs().max()
    return settings if bool(error <= TOLERANCE[x.dtype] * size) else None


def _watched(layer: Any, x: Tensor, embeddings: tuple[Tensor, Tensor]) -> tuple[Any, dict[str, Any]]:
    """What the layer's own forward returns, and the settings that it gave its attention."""
    settings: dict[str, Any] = {}

    def watch(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Any:
        settings.update({name: given[name] for name in _SETTINGS if given.get(name) is not None})
        return attention(module, q, k, v, mask, **given)

    config = layer.self_attn.config
    before = config._attn_implementation
    AttentionInterface.register(_WATCH, watch)
    config._attn_implementation = _WATCH
    try:
        return type(layer).forward(layer, x, position_embeddings=embeddings), settings
    finally:
        config._attn_implementation = before
        AttentionInterface._global_mapping.pop(_WATCH, None)
