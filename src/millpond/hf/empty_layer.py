"""A layer of a cache that stores nothing, for any supported version of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class EmptyLayer(CacheLayerMixin):
    """Stands in a cache for a layer of the model that stores nothing there."""

    supports_early_init = False
    is_compileable = True
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to make."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """
        Raises:
            NotImplementedError: always; the layer has no attention of its own.
        """
        raise NotImplementedError("this layer stores nothing, so there is nothing to append to")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that a mask covers, and where it begins: those of the pass alone."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: it has seen nothing."""
        return 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def offload(self) -> None:
        """Nothing to move."""

    def prefetch(self) -> None:
        """Nothing to move."""

    def reset(self) -> None:
        """Nothing to forget."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to remove."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing to reorder."""
