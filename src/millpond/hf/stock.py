"""What transformers itself would do: the path of a stock cache, or of none, on a model whose attention is switched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import sdpa_mask

from millpond.errors import UnsupportedModelError

_ATTRIBUTE = "_millpond_stock_mask"


def remember(
    padding: Tensor,
    *,
    q_length: int,
    mask_function: Callable[..., Any] | None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> None:
    """Attach to the two-dimensional mask `padding` how transformers would make its own mask."""
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    make = partial(sdpa_mask, q_length=q_length, allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, **kwargs)
    overlaid = use_vmap or (q_length > 1 and not allow_is_causal_skip)
    setattr(padding, _ATTRIBUTE, (make, overlaid))


def is_overlaid(mask: Tensor | None) -> bool:
    """Whether the model laid something over the causal or sliding mask (images that see ahead, packed sequences)."""
    return bool(getattr(mask, _ATTRIBUTE, (None, False))[1])


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Eager or sdpa attention over all keys and values that a stock cache returned. Returns (B, Q, Hq, D), None."""
    if hasattr(attention_mask, _ATTRIBUTE):
        attention_mask = getattr(attention_mask, _ATTRIBUTE)[0]()
    elif attention_mask is not None and attention_mask.ndim == 2:
        raise UnsupportedModelError(
            f"{type(module).__name__} changed its padding mask on the way, so it runs with a Millpond cache only; "
            "close() the cache first"
        )
    if softcap is None and s_aux is None:
        sdpa = AttentionInterface._global_mapping["sdpa"]
        out: tuple[Tensor, Tensor | None] = sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return out
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return _plain(query, key, value, attention_mask, scale, softcap, s_aux), None


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention with a soft cap or sink logits, which sdpa does not know. Returns (B, Q, Hq, D)."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = (query @ key.transpose(-1, -2)).float() * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is None:
        ahead = logits.shape[-1] - logits.shape[-2]
        attention_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).tril(ahead)[None, None]
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
