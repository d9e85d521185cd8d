"""The attention function and the mask function that are registered with transformers under the name "millpond"."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from millpond.cache.layer import AttentionShape
from millpond.errors import UnsupportedModelError

NAME = "millpond"
_TAG = "_millpond_layer"
_STOCK = "_millpond_stock_mask"


class _Last(threading.local):
    """The layer whose update() came last in this thread, until its attention has run."""

    layer: Any = None


_last = _Last()


def register() -> None:
    """Make the name known to transformers. Done once, when the first cache is made; importing registers nothing."""
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)


def tag(keys: Tensor, layer: Any) -> Tensor:
    """A view of `keys` that leads the attention function back to its cache layer."""
    view = keys.view(keys.shape)
    setattr(view, _TAG, layer)
    _last.layer = layer
    return view


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The two-dimensional padding mask (B, kv_length), and a way to make the stock mask if a stock cache is used."""
    padding = attention_mask
    if padding is None:
        padding = torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    result = padding[:, -kv_length:].bool().view(batch_size, -1)
    stock = partial(
        sdpa_mask,
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        attention_mask=attention_mask, **({"mask_function": mask_function} if mask_function else {}), **kwargs,
    )  # fmt: skip
    overlaid = bool(kwargs.get("use_vmap")) or (q_length > 1 and kwargs.get("allow_is_causal_skip") is False)
    setattr(result, _STOCK, (stock, overlaid))
    return result


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention through the cache layer that produced `key`; without one, what stock transformers would do.

    Shapes: query (B, Hq, Q, D), key and value (B, Hkv, Q, D): the new entries. Returns (B, Q, Hq, D) and None.
    """
    layer, _last.layer = getattr(key, _TAG, None) or _last.layer, None
    if layer is None:
        return _stock(module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, s_aux, position_bias, kwargs)
    _check(module, layer, attention_mask, position_bias)
    shape = AttentionShape(
        scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        softcap=float(softcap or 0.0),
        window=int(sliding_window or 0),
        sink_logits=s_aux.detach().float() if s_aux is not None else None,
    )
    out = layer.attend(query, key, value, attention_mask, shape)
    return out.transpose(1, 2), None


def _check(module: nn.Module, layer: Any, attention_mask: Tensor | None, position_bias: Tensor | None) -> None:
    name = type(module).__name__
    index = getattr(module, "layer_idx", layer.index)
    if index != layer.index:
        raise UnsupportedModelError(f"{name} of layer {index} attends to the keys of layer {layer.index}; shared caches are not supported")
    if position_bias is not None:
        raise UnsupportedModelError(f"{name} adds a position bias to its logits, which a compressed cache does not carry")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedModelError(f"{name} was given a {attention_mask.ndim}-dimensional mask; pass the 2-D padding mask")
    if getattr(attention_mask, _STOCK, (None, False))[1]:
        raise UnsupportedModelError(f"{name} uses a mask that is not causal (an overlay), which a compressed cache cannot follow")


def _stock(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    position_bias: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """What transformers does for this module with a stock cache or none: its eager or sdpa attention."""
    stock = getattr(attention_mask, _STOCK, None)
    if stock is not None:
        attention_mask = stock[0]()
    if softcap is None and s_aux is None:
        sdpa = AttentionInterface._global_mapping["sdpa"]
        result: tuple[Tensor, Tensor | None] = sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            sliding_window=sliding_window, position_bias=position_bias, **kwargs,
        )  # fmt: skip
        return result
    return _plain(query, key, value, attention_mask, scaling, softcap, s_aux), None


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention with a soft cap or sink logits, which sdpa does not know. Returns (B, Q, Hq, D)."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = (query @ key.transpose(-1, -2)).float() * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is None:
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).tril(logits.shape[-1] - logits.shape[-2])
        attention_mask = causal[None, None]
    if attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    else:
        logits = logits + attention_mask
    if s_aux is not None:
        sink = s_aux.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(logits, -1)
    return (weights.to(value.dtype) @ value).transpose(1, 2)
