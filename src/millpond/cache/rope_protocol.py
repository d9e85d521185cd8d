"""Protocol of a model's rotary embedding, as the cache uses it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RotaryEmbedding(Protocol):
    """The rotary embedding of a model.

    Attributes:
        reach: positions that the model was trained on.
    """

    reach: int

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Keys or queries (B, H, n, D), rotated to (or back from) positions (B, n), in float32 or wider."""
        ...
