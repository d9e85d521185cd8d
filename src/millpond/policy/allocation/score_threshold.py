"""Head budgets by a score threshold: entries below it are evicted, so that budgets follow the text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.policy.allocation.heads import Ada


@dataclass(frozen=True, slots=True)
class AboveThreshold:
    """Each head keeps its entries whose value is at least the threshold, those that are protected, and never none.

    Where that is more than the budget, the highest values of all heads together stay, and the total is the budget.
    """

    threshold: float
    every: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise OptionError(f"threshold={self.threshold} must be a finite number")

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        return protected.clamp(min=1)

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        above = valid & (pinned | (value >= self.threshold))
        counts = torch.minimum(above.sum(1).clamp(min=1), valid.sum(1))
        if int(counts.sum()) <= len(value) * budget:
            return counts
        return Ada(alpha=0.0).keep_counts(value, valid, pinned, budget)
