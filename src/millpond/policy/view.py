"""What a policy sees of one layer of one sequence when it plans."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class View:
    """The entries of one layer of one sequence, in the order of their positions.

    Attributes:
        positions: (H, N) int32, ascending along N; -1 where a head has no entry (all of these come last).
        signal: (H, N) float32, the attention that the score asked for; None if it asked for none.
        seen: tokens of this sequence so far; the newest has position seen - 1.
        layer: index of the layer.
    """

    positions: Tensor
    signal: Tensor | None
    seen: int
    layer: int

    @property
    def valid(self) -> Tensor:
        """(H, N) bool: where there is an entry."""
        return self.positions >= 0

    @property
    def counts(self) -> Tensor:
        """(H,) entries per head."""
        return self.valid.sum(1)

    @property
    def heads(self) -> Tensor:
        """(H, 1) head indices."""
        return torch.arange(self.positions.shape[0], device=self.positions.device)[:, None]
