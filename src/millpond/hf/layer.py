"""One cache layer as transformers wants it: a thin coat over `cache.layer.LayerCache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from millpond.cache.journal import Journal
from millpond.cache.layer import AttentionShape, LayerCache
from millpond.errors import UnsupportedModelError
from millpond.hf.attention import tag


class MillpondLayer(CacheLayerMixin):
    """Hands new keys to the attention function, which brings them back with the queries to `attend`."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, core: LayerCache, journal: Journal) -> None:
        super().__init__()
        self.core = core
        self.journal = journal
        self._waiting = False

    @property
    def index(self) -> int:
        """Number of the layer in the model."""
        return self.core.index

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back without a recording: only where nothing is ever evicted."""
        return self.core.policy.keeps_all

    @property
    def batch_size(self) -> int:
        """Sequences held, -1 before the first token."""
        return self.core.timeline.n_seq or -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: pages are taken when the first entries arrive."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys, tagged, and the new values: only these; the stored ones stay in their pages."""
        if self._waiting:
            self._waiting = False
            raise UnsupportedModelError(
                f"layer {self.index} took in keys, but its attention did not come back to the cache: the model bypasses "
                "transformers' attention interface, or the cache was made for another model"
            )
        self._waiting = True
        return tag(key_states, self), value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> Tensor:
        """See `LayerCache.attend`."""
        self._waiting = False
        return self.journal.attend(self.core, q, k, v, mask, shape)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.core.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen (pads included), not entries stored: positions, masks and stop rules depend on it."""
        return self.core.columns

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._waiting = False
        self.core.reset()

    def offload(self) -> None:
        """Nothing to do: stock offloading is not used with this cache."""

    def prefetch(self) -> None:
        """Nothing to do: stock offloading is not used with this cache."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.core.select([int(i) for i in beam_idx.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        n = self.core.table.n_seq if self.core.table is not None else 0
        self.core.select([s for s in range(n) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.core.select([int(i) for i in indices.tolist()])

    def __repr__(self) -> str:
        return f"MillpondLayer({self.index}, stored={self.core.stored.tolist()})"
