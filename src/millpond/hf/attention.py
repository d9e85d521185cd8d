"""Attention and mask functions registered with transformers as "millpond", and the switch to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from millpond.errors import UnsupportedModelError
from millpond.hf import stock_attention
from millpond.hf.grad_mode import refuse_gradients
from millpond.kernels.args import AttentionShape

#: Configurations whose attention is switched: id -> (users, the implementation before the first).
_switched: dict[int, tuple[int, str | None]] = {}
# taken by finalizers too, which may run in a thread that holds it
_lock = threading.RLock()


def switch(config: PreTrainedConfig, name: str) -> Callable[[], None]:
    """Let models of this configuration attend through the implementation called `name`.

    Returns:
        Function that undoes it, once no other caller needs it. It keeps the configuration alive.
    """
    with _lock:
        users, previous = _switched.get(id(config), (0, config._attn_implementation))
        _switched[id(config)] = (users + 1, previous)
        config._attn_implementation = name

    def undo() -> None:
        with _lock:
            users, previous = _switched.pop(id(config))
            if users > 1:
                _switched[id(config)] = (users - 1, previous)
            else:
                config._attn_implementation = previous

    return undo


def before(config: PreTrainedConfig | None) -> str | None:
    """Return the implementation of a configuration before it was switched, or None."""
    return _switched.get(id(config), (0, None))[1]


NAME = "millpond"
_TAG = "_millpond_layer"
_STOCK_MASKS: dict[str, Callable[..., Any]] = {"eager": eager_mask, "sdpa": sdpa_mask}


class _Pending(threading.local):
    """State of the passes of this thread.

    Attributes:
        layer: Layer whose update() came last, until its attention has run.
        ours: Whether a pass on a Millpond cache is in flight. Other passes of a switched model are transformers' own.
    """

    layer: Any = None
    ours: bool = False


_pending = _Pending()


def register() -> None:
    """Register the functions with transformers.

    Done once, when the first cache is made; importing registers nothing.
    """
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)


def switch_attention(config: PreTrainedConfig) -> Callable[[], None]:
    """Let models of this configuration attend through Millpond.

    Returns:
        Function that undoes it, once no other user is left.
    """
    register()
    return switch(config, NAME)


def tag(keys: Tensor, layer: Any) -> Tensor:
    """Return a view of `keys` by which the attention function finds its cache layer.

    Models that rebuild their keys lose the view; for them the order of calls decides: each update() is followed by the
    attention of its layer.

    Raises:
        UnsupportedModelError: the attention of the layer before did not follow its update().
    """
    _check_none_pending()
    view = keys.view(keys.shape)
    setattr(view, _TAG, layer)
    _pending.layer = layer
    return view


def _check_none_pending() -> None:
    layer, _pending.layer = _pending.layer, None
    if layer is not None:
        raise UnsupportedModelError(
            f"layer {layer.index} took in keys, but its attention did not come back to the cache: the model bypasses "
            "transformers' attention interface, or its attention was switched after compress()"
        )


def begin_pass() -> None:
    """Begin a pass on a Millpond cache in this thread."""
    _pending.layer, _pending.ours = None, True


def end_pass() -> None:
    """End the pass of this thread.

    Raises:
        UnsupportedModelError: the attention of the last update() did not come.
    """
    _pending.ours = False
    _check_none_pending()


def break_off() -> None:
    """Abort the pass of this thread; no attention is expected any more."""
    _pending.layer, _pending.ours = None, False


def mask(
    *, batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Return the padding mask (B, kv_length), with a way to make the stock mask attached.

    It is (B, 1, 1, kv_length) for models whose layers share keys: Gemma 4 cuts the rows of queries out of its masks. If
    the model is called without a mask, all new tokens count as real, (B, q_length). A pass over a stock cache receives
    the stock mask, so it stays correct if compression is switched off before the pass ends.
    """
    sizes: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    stock_mask = _STOCK_MASKS.get(before(kwargs.get("config")) or "")
    if stock_mask is not None and not _pending.ours:
        stock: Tensor = stock_mask(**sizes, attention_mask=attention_mask, **kwargs)
        return stock
    if attention_mask is not None and stock_attention.is_remembered(attention_mask):
        return attention_mask  # made by an outer model for the one inside, as transformers keeps its own
    if attention_mask is None:
        padding = torch.ones(1, 1, dtype=torch.bool, device=kwargs.get("device")).expand(batch_size, q_length)
    else:
        padding = attention_mask[:, -kv_length:].bool()
    if getattr(kwargs.get("config"), "num_kv_shared_layers", None):
        padding = padding[:, None, None]
    stock_attention.remember(padding, **sizes, attention_mask=attention_mask, **kwargs)
    return padding


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
    """Return the attention through the cache layer that produced `key`.

    Without one it is that of stock transformers. Shapes: query (B, Hq, Q, D), key and value (B, Hkv, Q, D): the new
    entries. Returns (B, Q, Hq, D) and None.
    """
    tagged = getattr(key, _TAG, None)
    layer = tagged or _pending.layer
    reads_others = tagged is not None and getattr(module, "layer_idx", None) in getattr(tagged, "readers", ())
    if reads_others:
        _check_none_pending()
    elif tagged is not None and tagged is not _pending.layer:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to the keys of layer {tagged.index} a second time in one pass; a cache "
            "follows one attention per layer"
        )
    _pending.layer = None
    attention_mask = stock_attention.flat(attention_mask)
    if layer is None:
        return stock_attention.attention(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling,
            softcap,
            s_aux,
            dropout=dropout,
            sliding_window=sliding_window,
            position_bias=position_bias,
            **kwargs,
        )
    window = int(sliding_window or stock_attention.window_of(attention_mask))
    if reads_others:
        attention_mask = None  # the owner of the keys was given it, and follows it; this one may be cut
    _check(module, layer, reads_others, attention_mask, position_bias, dropout, window)
    shape = AttentionShape(
        scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        softcap=float(softcap or 0.0),
        window=window,
        sink_logits=s_aux.detach().float() if s_aux is not None else None,
    )
    if reads_others:
        out = layer.attend_shared(query, shape)
    else:
        out = layer.attend(query, key, value, attention_mask, shape)
    # contiguous as transformers' own functions have it: some models view it
    return refuse_gradients(out.transpose(1, 2).contiguous(), query, key, value), None


def check_window(name: str, configured: int, passed: int) -> None:
    """Check that a sliding window of the configuration reaches attention or mask.

    Raises:
        UnsupportedModelError: the configuration has a sliding window, and neither attention nor mask is given one.
    """
    if configured and not passed:
        raise UnsupportedModelError(
            f"{name} leaves its sliding window of {configured} tokens to transformers' own cache: it would see all of "
            "any other, and answer otherwise"
        )


def _check(
    module: nn.Module,
    layer: Any,
    reads: bool,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    dropout: float,
    window: int,
) -> None:
    name = type(module).__name__
    index = getattr(module, "layer_idx", None)
    if (
        index is not None and index >= 0 and index != layer.index and not reads
    ):  # one attention of several layers has no number
        raise UnsupportedModelError(
            f"{name} of layer {index} attends to the keys of layer {layer.index}, and its configuration does not say "
            "so: a cache cannot tell who reads what"
        )
    if dropout:
        raise UnsupportedModelError(f"{name} drops out attention ({dropout}), as in training; call model.eval() first")
    if position_bias is not None:
        raise UnsupportedModelError(f"{name} adds a position bias to its logits, which a cache does not carry")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedModelError(
            f"{name} was given a mask of {attention_mask.ndim} dimensions, by the caller or by the model around it; a "
            "cache follows the padding mask alone, of two"
        )
    check_window(name, getattr(layer, "window", 0), window)
    if stock_attention.is_overlaid(attention_mask, window):
        raise UnsupportedModelError(f"{name} uses a mask that is not causal (an overlay), which a cache cannot follow")
