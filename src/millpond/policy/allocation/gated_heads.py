"""Head budgets by a gate: entries above its threshold, so that the text says how much a head keeps (Attention-Gate)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.policy.allocation.heads import Ada


@dataclass(frozen=True, slots=True)
class GatedHeads:
    """Each head keeps its entries whose value is above the threshold, those that are protected, and never too few.

    Where that is more than the budget, the highest values of all heads together stay, and the total is the budget.

    Attributes:
        threshold: 0 to 1. least: entries that a head keeps at least: a count, or a share of those it has.
    """

    threshold: float = 0.5
    least: int | float = 0
    every: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold={self.threshold} is compared with a probability; give 0 to 1")
        if self.least < 0 or (isinstance(self.least, float) and self.least > 1):
            raise OptionError(f"floor={self.least} must be a count of entries, or a share of them from 0.0 to 1.0")

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        return protected.clamp(min=1)

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        counts = (valid & (pinned | (value > self.threshold))).sum(1)
        held = valid.sum(1)
        least = self._least(held)
        if budget < int(least.max()):
            least = least.clamp(max=budget)
        counts = torch.minimum(counts.maximum(least), held)
        if int(counts.sum()) <= len(value) * budget:
            return counts
        return Ada(alpha=0.0).keep_counts(value, valid, pinned, budget)

    def _least(self, held: Tensor) -> Tensor:
        """(H,) int64, at least 1: what heads that hold `held` (H,) keep whatever the gate says."""
        if isinstance(self.least, float):
            return held.new_tensor([max(1, math.ceil(round(self.least * n, 9))) for n in held.tolist()])
        return held.new_full(held.shape, max(1, self.least))
