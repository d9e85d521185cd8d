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
        sequence: which sequence of the batch that was first read; copies keep the number of their original.
        budget: entries per head on average that the plan may keep; 0 where nobody plans.
        pinned: (H, N) bool, the entries that no score can evict; None where nobody plans.
    """

    positions: Tensor
    signal: Tensor | None
    seen: int
    layer: int
    sequence: int = 0
    budget: int = 0
    pinned: Tensor | None = None

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
