"""Decoder layers of one model in a few native calls, switched on while it decodes on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from millpond.errors import UnsupportedModelError
from millpond.hf.attention import attention
from millpond.hf.native_layers.forward_override import ForwardOverride
from millpond.hf.native_layers.linears import use_native_linears
from millpond.kernels import decoder_ops
from millpond.kernels.decoder_ops import TOLERANCE, choose
from millpond.models.cache_argument import cache_argument
from millpond.models.lean.block import Block
from millpond.models.lean.fuse import apart
from millpond.models.lean.layers import block_of
from millpond.models.lean.watch import Watch, own_forward

#: Keyword arguments of a layer that its attention uses; others are ignored.
_SETTINGS = ("scaling", "sliding_window", "softcap", "s_aux", "position_bias")
_TRIAL, _SETTINGS_KEY = "millpond_trial", "_millpond_settings"


class _Parts(NamedTuple):
    """Parts of a layer.

    Attributes:
        attention: Its attention module.
        block: Its weights as native calls take them.
        settings: Keyword arguments of its attention, as the layer itself passes them.
        dtype: Dtype of all weights.
    """

    attention: Any
    block: Block
    settings: dict[str, Any]
    dtype: torch.dtype


class _LayerRecord(NamedTuple):
    """Record of a layer, valid as long as `watch` reports it unchanged.

    Attributes:
        watch: Watch of the modules inside the layer.
        tried: Whether it was tried out.
        parts: Its parts; None if it was not tried, or must use its own forward.
    """

    watch: Watch
    tried: bool = False
    parts: _Parts | None = None


#: Records of the layers that are switched.
_records: weakref.WeakKeyDictionary[nn.Module, _LayerRecord] = weakref.WeakKeyDictionary()


def forward(
    self: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """Run a decoder layer natively if possible, in place of its forward."""
    parts = None
    if cache is None:
        cache = kwargs.pop("past_key_values", None)
    if position_embeddings is not None and cache is not None and decoder_ops.fits(hidden_states, ()):
        parts = _parts_of(self, hidden_states.dtype)
    if parts is None:
        return type(self).forward(
            self,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_argument(cache),
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
    assert position_embeddings is not None, "checked above"
    return _run(parts, hidden_states, attention_mask, cache, position_embeddings)


STAND_IN = ForwardOverride(forward)


def _parts_of(layer: nn.Module, dtype: torch.dtype) -> _Parts | None:
    """Return the parts of a layer that may pass rows of this dtype natively now, or None.

    A layer of which anything was replaced since is taken apart and tried out again.
    """
    record = _records.get(layer)
    if record is None:
        return None
    if not record.watch.same():
        _records[layer] = record = _begin(layer)
    if not record.watch.quiet():
        return None
    if not record.tried:
        _records[layer] = record = _learn(layer, record)
    parts = record.parts
    if parts is None or parts.dtype is not dtype:
        return None
    return parts if parts.attention.config._attn_implementation in AttentionInterface._global_mapping else None


def _run(parts: _Parts, x: Tensor, mask: Tensor | None, cache: Any, embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """Run a layer: (B, Q, width) -> (B, Q, width)."""
    module = parts.attention
    batch, length = x.shape[:2]
    attention_function: Any = AttentionInterface._global_mapping[module.config._attn_implementation]

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(batch, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, index)
        out: Tensor = attention_function(module, q, k, v, mask, dropout=0.0, **parts.settings)[0]
        return out.reshape(batch * length, -1)

    cos, sin = (t.expand(batch, length, -1).reshape(batch * length, -1) for t in embeddings)
    rows = x.reshape(batch * length, -1)
    return parts.block.forward(rows, (cos, sin), attend, choose(rows)).view(x.shape)


def use_lean_layers(model: nn.Module) -> Callable[[], None]:
    """Let decoder layers that are built as Llama's pass few rows (decoding) in native calls.

    A layer is switched if its modules are those of Llama or Qwen3 and a trial gives what its own forward gives. Only
    `forward` is replaced; passes of many rows, with gradients, or with hooks inside the layer take the layer's own.

    Returns:
        Function that undoes it, once no other caller needs it.
    """
    switched = []
    for module in model.modules():
        if not STAND_IN.serves(module):
            if not _may_be_taken_apart(module):
                continue
            record = _begin(module)
            if record.watch.quiet():
                record = _learn(module, record)
            if record.parts is None:
                continue
            _records[module] = record
        switched.append(module)
    return STAND_IN.begin(switched)


def _may_be_taken_apart(layer: Any) -> bool:
    """Whether a module may be a decoder layer as Llama has it."""
    return hasattr(layer, "input_layernorm") and hasattr(getattr(layer, "self_attn", None), "config")


def _begin(layer: nn.Module) -> _LayerRecord:
    """Return the record of a layer in its current state, not tried out yet."""
    return _LayerRecord(Watch([module for module in layer.modules() if module is not layer], around=layer))


def _learn(layer: nn.Module, record: _LayerRecord) -> _LayerRecord:
    """Return the record with the layer's parts, if our pass agrees with its own forward."""
    return record._replace(tried=True, parts=_take_apart(layer))


def _take_apart(layer: Any) -> _Parts | None:
    """Return the parts of a decoder layer as Llama has it; None if it computes anything else."""
    inside = [module for module in layer.modules() if module is not layer]
    if not _may_be_taken_apart(layer) or any(own_forward(module) is not None for module in (layer, *inside)):
        return None
    try:
        block = block_of(layer, apart)
    except UnsupportedModelError:
        return None
    weight = layer.input_layernorm.weight
    if not weight.is_cpu or weight.dtype not in TOLERANCE:
        return None
    weights = [weight for module in inside for weight in module._parameters.values()]
    return _try_out(layer, block, weights)


@torch.no_grad()
def _try_out(layer: Any, block: Block, weights: list[Tensor | None]) -> _Parts | None:
    """Return the layer's parts, if our pass and its own agree on two random tokens."""
    weight, attn = layer.input_layernorm.weight, layer.self_attn
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, len(weight), generator=generator).to(weight.dtype)
    angles = torch.rand(1, 2, attn.head_dim // 2, generator=generator).repeat(1, 1, 2) * 6
    embeddings = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if not decoder_ops.fits(x, weights):
        return None
    twin, settings = _twin(layer)
    try:
        expected = type(layer).forward(twin, x, position_embeddings=embeddings)
        computed = _run(_Parts(twin.self_attn, block, settings, x.dtype), x, None, None, embeddings)
    except (TypeError, ValueError, RuntimeError):
        return None  # not a layer like Llama's after all
    if not isinstance(expected, Tensor) or expected.shape != computed.shape:
        return None
    error, size = (computed - expected).abs().max(), (expected - x).abs().max()
    return _Parts(attn, block, settings, x.dtype) if bool(error <= TOLERANCE[x.dtype] * size) else None


def _twin(layer: Any) -> tuple[Any, dict[str, Any]]:
    """Return a layer of the same modules whose attention records its settings, and these.

    The layer itself does not change: another thread may be passing it.
    """
    if _TRIAL not in AttentionInterface._global_mapping:
        AttentionInterface.register(_TRIAL, _record_settings)
    twin, attn = copy(layer), copy(layer.self_attn)
    attn.config = copy(layer.self_attn.config)
    attn.config._attn_implementation_internal = _TRIAL
    settings: dict[str, Any] = {}
    attn.__dict__[_SETTINGS_KEY] = settings
    twin._modules = dict(layer._modules, self_attn=attn)
    return twin, settings


def _record_settings(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """Record the settings of a trial and return its attention."""
    module.__dict__[_SETTINGS_KEY].update({name: options[name] for name in _SETTINGS if options.get(name) is not None})
    return attention(module, q, k, v, mask, **options)


def use_native_layers(model: nn.Module) -> Callable[[], None]:
    """Let layers like Llama's pass few rows natively, and of other layers the linear ones.

    Returns:
        Function that undoes it, once no other caller needs it.
    """
    undo_linears, undo_layers = use_native_linears(model), use_lean_layers(model)

    def undo() -> None:
        undo_layers()
        undo_linears()

    return undo
