"""One layer of a cache that lives for one pass over whole texts."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class PassLayer(CacheLayerMixin):
    """A layer that reports an empty past to masks and positions; subclasses define `update`."""

    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: nothing is kept beyond the pass."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
