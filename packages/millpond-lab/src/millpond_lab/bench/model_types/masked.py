"""The oracle: transformers' own full cache, under an attention that hides from each head what another cache evicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from millpond.hf.attention import switch
from millpond.hf.model_profile import ModelProfile
from millpond.hf.stock_attention import plain

NAME = "millpond_masked"
#: Positions held, by number of the layer in the model: [sequence][KV head].
Held = Mapping[int, Sequence[Sequence[Sequence[int]]]]


class _Full(DynamicCache):
    """transformers' own cache, which tells what layer has taken in keys last: its attention follows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.layer = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Masked:
    """Attention over all keys and values, of which each KV head shows what is held and what is new.

    Attributes:
        held: positions that are visible besides the new ones; None shows all.
        pads: columns of padding before each sequence, (B,).
    """

    def __init__(self, pads: Tensor) -> None:
        self.pads = pads
        self.held: Held | None = None
        self._cache: _Full | None = None
        self._owners: dict[int, int] = {}

    def cache(self, model: PreTrainedModel) -> DynamicCache:
        """A cache for the run: all keys and values, and the states of a hybrid."""
        profile = ModelProfile.of(model)
        self._owners = profile.shared
        self._cache = _Full(config=profile.config) if profile.state_layers else _Full()
        for number, layer in enumerate(self._cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:  # the model's mask hides what is outside, as with the others
                self._cache.layers[number] = DynamicLayer()  # type: ignore[no-untyped-call]
        return self._cache

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention with masks: query (B, Hq, Q, D), key and value (B, Hkv, T, D) -> (B, Q, Hq, D)."""
        batch, n_heads, n_new, dim = query.shape
        if not hasattr(module, "layer_idx") or getattr(module, "is_cross_attention", False):  # to a picture
            shown = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool)
        else:
            assert self._cache is not None, "the run has a cache of `cache`"
            number = module.layer_idx
            assert isinstance(number, int), "modules of attention are numbered"
            shown = self._shown(self._owners.get(number, self._cache.layer), batch, n_heads, n_new, key.shape[2])
        if attention_mask is not None:
            shown = shown & (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)
        scale = scaling if scaling is not None else dim**-0.5
        return plain(query, key, value, shown, scale, softcap, s_aux).contiguous(), None

    def _shown(self, layer: int, batch: int, n_heads: int, n_new: int, n: int) -> Tensor:
        """(B, Hq, 1, T): what each query head may see, but for the model's own mask."""
        shown = torch.ones(batch, n_heads, 1, n, dtype=torch.bool)
        if self.held is None:
            return shown
        for sequence, heads in enumerate(self.held[layer]):
            group = n_heads // len(heads)
            for head, positions in enumerate(heads):
                seen = torch.zeros(n, dtype=torch.bool)
                seen[torch.tensor(positions, dtype=torch.long) + self.pads[sequence]] = True
                seen[n - n_new :] = True
                shown[sequence, head * group : (head + 1) * group] = seen
        return shown


@contextmanager
def attending(model: PreTrainedModel, masked: Masked) -> Iterator[None]:
    """Inside, the language side of the model attends through `masked`."""
    AttentionInterface.register(NAME, masked.attention)
    AttentionMaskInterface.register(NAME, _mask)
    undo = switch(ModelProfile.of(model).config, NAME)
    try:
        yield
    finally:
        undo()
        del AttentionInterface._global_mapping[NAME], AttentionMaskInterface._global_mapping[NAME]


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers, never left out for being causal."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
