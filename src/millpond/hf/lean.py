"""use_lean_layers: while a model decodes on a CPU, run a decoder layer in a few native calls.

A step of decoding spends more time between the operations of a layer (norms, rotary embedding, gates: some fifty small
ones) than in its attention. Where a layer is built as Llama's is, the same arithmetic takes six calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from millpond.hf.attention import attention
from millpond.hf.linears import STAND_IN as LINEARS
from millpond.hf.stand_in import StandIn
from millpond.kernels import native, rows
from millpond.kernels.rows import Gate

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_GATES = {"silu": Gate.SILU, "swish": Gate.SILU, "gelu": Gate.GELU, "gelu_pytorch_tanh": Gate.GELU_TANH}
#: What a layer says of its attention; the rest of what it passes on is nothing to us.
_SETTINGS = ("scaling", "sliding_window", "softcap", "s_aux", "position_bias")
_WATCH = "millpond_watch"
#: Most relative difference between a layer's own outcome and ours on random rows, by dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

#: The parts of layers that are switched, and the settings of their attention.
_known: weakref.WeakKeyDictionary[nn.Module, tuple[_Parts, dict[str, Any]]] = weakref.WeakKeyDictionary()


class _Parts(NamedTuple):
    """A layer taken apart. Weights are read anew at each pass, so that new ones count."""

    config: Any
    gate: Gate
    modules: tuple[nn.Module, ...]  # all inside: what must have no hooks
    weighted: tuple[nn.Module, ...]  # those that have weights
    head_norms: bool


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
    parts, settings = _known.get(self, (None, {}))
    if parts is None or position_embeddings is None or past_key_values is None or not _ready(parts, hidden_states):
        return type(self).forward(
            self, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
        )  # fmt: skip
    return _run(self, parts, settings, hidden_states, attention_mask, past_key_values, position_embeddings)


_STAND_IN = StandIn(forward)


def _ready(parts: _Parts, x: Tensor) -> bool:
    """Whether the kernels take this pass, and nothing watches or replaces a module that would not be called."""
    known = parts.config._attn_implementation in AttentionInterface._global_mapping
    return (
        known
        and rows.fits(x, _weights(parts.weighted))
        and not any(m._forward_hooks or m._forward_pre_hooks or m.training for m in parts.modules)
    )


def _weights(modules: Iterable[nn.Module]) -> Iterator[Tensor | None]:
    for module in modules:
        yield from module._parameters.values()


def _run(
    layer: Any,
    parts: _Parts,
    settings: dict[str, Any],
    x: Tensor,
    mask: Tensor | None,
    cache: Any,
    embeddings: tuple[Tensor, Tensor],
) -> Tensor:
    """The layer: (B, Q, width) -> (B, Q, width). settings: of its attention, as the layer itself would pass them."""
    attn, mlp, before, after = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
    x = x.contiguous()
    heads = (*x.shape[:-1], -1, attn.head_dim)
    q, k, v = native.linears(
        x, (_part(attn.q_proj), _part(attn.k_proj), _part(attn.v_proj)), norm=before.weight,
        eps=before.variance_epsilon,
    )  # fmt: skip
    q, k, v = q.view(heads), k.view(heads), v.view(heads)
    if parts.head_norms:
        q = native.rms_norm(q, attn.q_norm.weight, attn.q_norm.variance_epsilon)
        k = native.rms_norm(k, attn.k_norm.weight, attn.k_norm.variance_epsilon)
    native.rotate_(q, k, *embeddings)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if cache is not None:
        k, v = cache.update(k, v, attn.layer_idx)
    attend = AttentionInterface._global_mapping[parts.config._attn_implementation]
    out, _ = attend(attn, q, k, v, mask, dropout=0.0, **settings)
    x = native.linears(out.reshape(*x.shape[:-1], -1), (_part(attn.o_proj),), residual=x)[0]
    inner = native.linears(
        x, (_part(mlp.gate_proj), _part(mlp.up_proj)), norm=after.weight, eps=after.variance_epsilon, gate=parts.gate
    )[0]
    return native.linears(inner, (_part(mlp.down_proj),), residual=x)[0]


def _part(linear: Any) -> tuple[Tensor, Tensor | None]:
    parameters = linear._parameters
    return parameters["weight"], parameters["bias"]


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
        if not _STAND_IN.serves(module):
            settings = _try_out(module, parts)
            if settings is None:
                continue
            _known[module] = parts, settings
        ours.append(module)
    return _STAND_IN.begin(ours)


def _take_apart(layer: Any) -> _Parts | None:
    """The parts of a decoder layer as Llama has it; None if it is anything else."""
    if {name for name, _ in layer.named_children()} != _LAYER or not _STAND_IN.may_serve(layer):
        return None
    attn, mlp = layer.self_attn, layer.mlp
    inside, feeds = dict(attn.named_children()), dict(mlp.named_children())
    known = set(inside) in (_ATTENTION, _ATTENTION | _HEAD_NORMS) and set(feeds) - {"act_fn"} == _FEED_FORWARD
    if not known or any(True for _ in attn.parameters(recurse=False)) or not hasattr(attn, "config"):
        return None
    linears = [inside[name] for name in _ATTENTION] + [feeds[name] for name in _FEED_FORWARD]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(inside[n] for n in _HEAD_NORMS if n in inside)]
    gate = _GATES.get(str(getattr(attn.config, "hidden_act", "")))
    if gate is None or any(type(m) is not nn.Linear for m in linears):
        return None
    if not all(hasattr(m, "variance_epsilon") for m in norms):
        return None
    modules = (attn, mlp, *linears, *norms, *(m for name, m in feeds.items() if name == "act_fn"))
    if any(set(m._parameters) != {"weight"} for m in norms):
        return None
    if any("forward" in m.__dict__ for m in (attn, mlp, *norms)) or not all(LINEARS.may_serve(m) for m in linears):
        return None
    return _Parts(attn.config, gate, modules, (*linears, *norms), set(inside) >= _HEAD_NORMS)


@torch.no_grad()
def _try_out(layer: Any, parts: _Parts) -> dict[str, Any] | None:
    """The settings that the layer gives its attention, if two random tokens come out of our pass as out of its own."""
    weight, attn = layer.input_layernorm.weight, layer.self_attn
    if not weight.is_cpu or weight.dtype not in _TOLERANCE:
        return None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, len(weight), generator=draw).to(weight.dtype)
    angles = torch.rand(1, 2, attn.head_dim // 2, generator=draw).repeat(1, 1, 2) * 6
    embeddings = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if not _ready(parts, x):
        return None
    try:
        own, settings = _watched(layer, x, embeddings)
        found = _run(layer, parts, settings, x, None, None, embeddings)
    except (TypeError, ValueError, RuntimeError):
        return None  # not a layer like Llama's after all
    if not isinstance(own, Tensor) or own.shape != found.shape:
        return None
    error, size = (found - own).abs().max(), (own - x).abs().max()
    return settings if bool(error <= _TOLERANCE[x.dtype] * size) else None


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
