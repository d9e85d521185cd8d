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
class _MaskRecipe:
    """Recipe by which transformers would make a mask.

    Attributes:
        make: Function that makes it; `mask_function=` and `use_vmap=` give another of the same kind.
        may_be_overlaid: Whether something may be combined with the causal or sliding mask.
        window: Tokens that a query sees; 0 for all.
    """

    make: Callable[..., Tensor | None]
    may_be_overlaid: bool
    window: int
    _overlaid: dict[int, bool] = field(default_factory=dict)

    def overlaid(self, window: int) -> bool:
        """Whether anything but a window is combined with the causal mask.

        Models also combine it with masks that change nothing: blocks of pictures for a text that has none.
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
    """Attach to the mask `padding` how transformers would make its own mask.

    `padding` has the shape (B, n) or (B, 1, 1, n).
    """
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
    setattr(padding, _ATTRIBUTE, _MaskRecipe(make, overlaid, local_size or 0))


def _recipe_of(mask: Tensor | None) -> _MaskRecipe | None:
    recipe: _MaskRecipe | None = getattr(mask, _ATTRIBUTE, None)
    return recipe


def flat(mask: Tensor | None) -> Tensor | None:
    """Return a mask that `remember` was called with in two dimensions; any other as it is."""
    recipe = _recipe_of(mask)
    if mask is None or recipe is None or mask.ndim == 2:
        return mask
    flat_mask = mask[:, 0, 0]
    setattr(flat_mask, _ATTRIBUTE, recipe)
    return flat_mask


def is_remembered(mask: Tensor | None) -> bool:
    """Whether the mask is one that `remember` was called with."""
    return _recipe_of(mask) is not None


def is_overlaid(mask: Tensor | None, window: int) -> bool:
    """Whether the model combined the causal or sliding mask with another one.

    Examples are images that see ahead and packed sequences. `window` is that of the layer, 0 for none.
    """
    recipe = _recipe_of(mask)
    return recipe is not None and recipe.overlaid(window)


def window_of(mask: Tensor | None) -> int:
    """Return the sliding window of the mask, 0 for none.

    Some models pass it to their mask alone, not to their attention.
    """
    recipe = _recipe_of(mask)
    return 0 if recipe is None else recipe.window


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
    """Return eager or sdpa attention over all keys and values of a stock cache.

    Returns:
        (B, Q, Hq, D), None.
    """
    recipe = _recipe_of(attention_mask)
    if recipe is not None:
        attention_mask = recipe.make()
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
    """Return attention with a soft cap or sink logits, which sdpa lacks, (B, Q, Hq, D)."""
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
