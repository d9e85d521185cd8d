"""Stock attention of transformers, with its own cache or none, on a model whose attention is switched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from millpond.errors import UnsupportedModelError

_ATTRIBUTE = "_millpond_stock_mask"


@dataclass(frozen=True)
class _Made:
    """How transformers would make a mask.

    Attributes:
        make: with `mask_function=` and `use_vmap=` another of the same kind.
        may_be_overlaid: whether something may lie over the causal or sliding mask.
        window: tokens that it lets a query see; 0 for all.
    """

    make: Callable[..., Tensor | None]
    may_be_overlaid: bool
    window: int
    _overlaid: dict[int, bool] = field(default_factory=dict)

    def overlaid(self, window: int) -> bool:
        """Whether anything but a window does. Models lay over what does nothing, too: blocks of pictures over a
        text that has none.
        """
        if self.may_be_overlaid and window not in self._overlaid:
            bare = sliding_window_causal_mask_function(window) if window else causal_mask_function
            mask, plain = self.make(), self.make(mask_function=bare, use_vmap=False)
            self._overlaid[window] = mask is None or plain is None or not torch.equal(mask, plain)
        return self.may_be_overlaid and self._overlaid[window]


def remember(
    padding: Tensor,
    *,
    q_length: int,
    mask_function: Callable[..., Any] | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Attach to the mask `padding`, (B, n) or (B, 1, 1, n), how transformers would make its own mask."""
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    make = partial(
        sdpa_mask,
        q_length=q_length,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        local_size=local_size,
        **kwargs,
    )
    overlaid = use_vmap or (q_length > 1 and not allow_is_causal_skip)
    setattr(padding, _ATTRIBUTE, _Made(make, overlaid, local_size or 0))


def _made(mask: Tensor | None) -> _Made | None:
    found: _Made | None = getattr(mask, _ATTRIBUTE, None)
    return found


def flat(mask: Tensor | None) -> Tensor | None:
    """A mask that `remember` was called with, in two dimensions; any other as it is."""
    made = _made(mask)
    if mask is None or made is None or mask.ndim == 2:
        return mask
    result = mask[:, 0, 0]
    setattr(result, _ATTRIBUTE, made)
    return result


def is_remembered(mask: Tensor | None) -> bool:
    """Whether the mask is one that `remember` was called with."""
    return _made(mask) is not None


def is_overlaid(mask: Tensor | None, window: int) -> bool:
    """Whether the model laid something over the causal mask, or that of a window (0: none): images that see ahead,
    packed sequences.
    """
    made = _made(mask)
    return made is not None and made.overlaid(window)


def window_of(mask: Tensor | None) -> int:
    """The sliding window of the mask, 0 for none: some models tell it to their mask alone, not to their attention."""
    made = _made(mask)
    return 0 if made is None else made.window


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
    made = _made(attention_mask)
    if made is not None:
        attention_mask = made.make()
    elif attention_mask is not None and attention_mask.ndim == 2:
        raise UnsupportedModelError(
            f"{type(module).__name__} changed its padding mask on the way, so it runs with a Millpond cache only; "
            "close() the cache first"
        )
    if softcap is None and s_aux is None:
        sdpa: Any = AttentionInterface._global_mapping["sdpa"]
        out: tuple[Tensor, Tensor | None] = sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return out
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return plain(query, key, value, attention_mask, scale, softcap, s_aux), None


def plain(
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
