"""Parts of a decoder layer, read from the modules of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from millpond.errors import UnsupportedModelError
from millpond.kernels.decoder_ops import GatedActivation, Norm, Projection
from millpond.models.lean.block import Block


class Take(Protocol):
    """Way to take linear layers: `fuse.together` or `fuse.apart`."""

    def __call__(
        self, layers: Sequence[nn.Linear], norm: Norm | None = None, act: GatedActivation | None = None
    ) -> Projection: ...


_LLAMA = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_NEOX = {"attention", "mlp", "input_layernorm", "post_attention_layernorm"}
_OPT = {"self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_ACTIVATIONS = {
    "silu": GatedActivation.SILU,
    "swish": GatedActivation.SILU,
    "gelu": GatedActivation.GELU,
    "gelu_pytorch_tanh": GatedActivation.GELU_TANH,
    "gelu_new": GatedActivation.GELU_TANH,
    "gelu_fast": GatedActivation.GELU_TANH,
    "relu": GatedActivation.RELU,
}
#: Modules that do nothing to a model that does not train, or whose doing is known by name.
_SILENT = ("act", "act_fn", "activation_fn", "post_attention_dropout", "post_mlp_dropout")


def block_of(layer: Any, take: Take) -> Block:
    """Return the layer's parts.

    The caller must try out that they compute what the layer does.

    Raises:
        UnsupportedModelError: it is not built as a layer of Llama, Qwen3, GPT-NeoX or OPT.
    """
    names = _names(layer)
    if names == _LLAMA:
        return _llama(layer, take)
    if names == _NEOX:
        return _neox(layer, take)
    if names == _OPT:
        return _opt(layer, take)
    raise UnsupportedModelError(f"{type(layer).__name__} has parts of its own: {', '.join(sorted(names))}")


def _llama(layer: Any, take: Take) -> Block:
    """Return the parts of a layer of Llama, Mistral, Qwen2, or Qwen3 with norms of heads."""
    attn, mlp = layer.self_attn, layer.mlp
    inside = _names(attn)
    _expect(attn, inside - _HEAD_NORMS, _PROJECTIONS | {"o_proj"})
    _expect(mlp, _names(mlp), {"gate_proj", "up_proj", "down_proj"})
    head_norms = inside >= _HEAD_NORMS
    into, dim = _linears(attn.q_proj, attn.k_proj, attn.v_proj), int(attn.head_dim)
    q, k, v = (len(linear.weight) for linear in into)
    if q % dim or k % dim or k != v:
        raise UnsupportedModelError(f"the heads of {type(attn).__name__} are not all of {dim} numbers")
    return Block(
        index=attn.layer_idx,
        head_dim=dim,
        qkv=take(into, norm_of(layer.input_layernorm)),
        out=take(_linears(attn.o_proj)),
        up=take(
            _linears(mlp.gate_proj, mlp.up_proj),
            norm_of(layer.post_attention_layernorm),
            _activation(attn.config.hidden_act),
        ),
        down=take(_linears(mlp.down_proj)),
        q_norm=norm_of(attn.q_norm) if head_norms else None,
        k_norm=norm_of(attn.k_norm) if head_norms else None,
    )


def _neox(layer: Any, take: Take) -> Block:
    attn, mlp = layer.attention, layer.mlp
    _expect(attn, _names(attn), {"query_key_value", "dense"})
    _expect(mlp, _names(mlp), {"dense_h_to_4h", "dense_4h_to_h"})
    return Block(
        index=attn.layer_idx,
        head_dim=int(attn.head_size),
        qkv=take(_linears(attn.query_key_value), norm_of(layer.input_layernorm)),
        out=take(_linears(attn.dense)),
        up=take(
            _linears(mlp.dense_h_to_4h), norm_of(layer.post_attention_layernorm), _activation(attn.config.hidden_act)
        ),
        down=take(_linears(mlp.dense_4h_to_h)),
        parallel=bool(layer.use_parallel_residual),
    )


def _opt(layer: Any, take: Take) -> Block:
    attn = layer.self_attn
    _expect(attn, _names(attn), _PROJECTIONS | {"out_proj"})
    norms = norm_of(layer.self_attn_layer_norm), norm_of(layer.final_layer_norm)
    first = bool(layer.do_layer_norm_before)
    return Block(
        index=attn.layer_idx,
        head_dim=int(attn.head_dim),
        qkv=take(_linears(attn.q_proj, attn.k_proj, attn.v_proj), norms[0] if first else None),
        out=take(_linears(attn.out_proj)),
        up=take(_linears(layer.fc1), norms[1] if first else None, _activation(attn.config.activation_function)),
        down=take(_linears(layer.fc2)),
        q_scale=float(attn.scaling),
        norms_behind=None if first else norms,
    )


def norm_of(module: Any) -> Norm:
    """Return the weights of a norm.

    Raises:
        UnsupportedModelError: it is neither RMSNorm with a weight nor LayerNorm with one.
    """
    if isinstance(module, nn.LayerNorm) and module.weight is not None:
        return Norm(module.weight, module.bias, float(module.eps), centred=True)
    if set(module._parameters) == {"weight"} and hasattr(module, "variance_epsilon"):
        return Norm(module.weight, None, float(module.variance_epsilon), centred=False)
    raise UnsupportedModelError(f"{type(module).__name__} is no norm with a weight")


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()} - set(_SILENT)


def _expect(module: nn.Module, names: set[str], expected: set[str]) -> None:
    if names != expected or module._parameters:
        raise UnsupportedModelError(f"{type(module).__name__} has parts of its own: {', '.join(sorted(names))}")


def _linears(*modules: Any) -> list[nn.Linear]:
    for module in modules:
        if type(module) is not nn.Linear or not all(map(_is_plain, module._parameters.values())):
            raise UnsupportedModelError(f"{type(module).__name__} is no plain linear layer")
    return list(modules)


def _is_plain(weight: nn.Parameter | None) -> bool:
    return weight is None or (type(weight) is nn.Parameter and weight.is_contiguous())


def _activation(name: Any) -> GatedActivation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"the activation {name!r} is not known")
    return _ACTIVATIONS[name]
