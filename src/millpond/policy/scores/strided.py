"""Patterns of positions that ignore the text, with or without heavy hitters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from millpond.kernels.decode_rules import Evict, Signal, Spacing, spaced_value
from millpond.policy.scores.attention import Queries
from millpond.policy.selection import rank_by_value
from millpond.policy.view import View

#: Above every worth of a unit of the pattern.
_HEAVY = 2.0**40


@dataclass(frozen=True, slots=True)
class Strided:
    """Units of `width` neighbouring positions at even distances.

    With `stride` every stride-th unit belongs to the pattern, and the newest units of it stay. Without, a unit is
    worth the largest power of two that divides its number: what stays is every s-th unit of the whole text, where s
    is the smallest power of two for which they fit, and the newest of every (s/2)-th. As the text grows s doubles by
    itself, and what it asks for is always still there.

    Attributes:
        width: Positions of a unit.
        stride: Units from one of the pattern to the next; 0 for the stride that the budget asks for.
        ends: The pattern's unit is the first of each stride (position 0 belongs to it), or the last.
        heavy: Share of the budget that goes to the entries with most attention, s_j = sum_i A_ij, outside the protected
            ones; it comes before the pattern.
    """

    width: int = 1
    stride: int = 0
    ends: Literal["first", "last"] = "first"
    heavy: float = 0.0
    window: int = 0

    @property
    def evict(self) -> Evict | None:
        """Eviction by position alone, unless there are heavy hitters to rank."""
        return None if self.heavy else Evict.SPACED

    @property
    def spacing(self) -> Spacing:
        """Pattern in the form of the decode kernel."""
        return Spacing(self.width, int(self.ends == "last"), self.stride)

    @property
    def queries(self) -> Queries:
        return "all" if self.heavy else "none"

    @property
    def signal(self) -> Signal:
        return Signal.SUM if self.heavy else Signal.NONE

    def score(self, view: View, seed: int) -> Tensor:
        worth = spaced_value(self.spacing, view.positions)
        if not self.heavy:
            return worth
        assert view.signal is not None, "the cache provides the signal that a score declares"
        assert view.pinned is not None, "a plan tells what is protected"
        free = view.valid & ~view.pinned
        rank = rank_by_value(view.signal, free, torch.zeros_like(free))
        is_heavy = free & (rank < math.floor(self.heavy * view.budget))
        return torch.where(is_heavy, _HEAVY + view.signal.double(), worth.double())
