"""Eviction plan: the entries that one layer keeps of one sequence, and how many each head may hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from millpond.policy.merging import Merged


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Entries that one layer keeps of one sequence.

    Attributes:
        keep: (H, N) bool over the view's columns.
        caps: (H,) int64, most entries that each head may hold from now on.
        merged: Columns of the view after those that leave were merged; None if they are dropped.
        standing: (H, N) float32 to store with the entries as their scores; None for those they were chosen by.
    """

    keep: Tensor
    caps: Tensor
    merged: Merged | None = field(default=None, kw_only=True)
    standing: Tensor | None = field(default=None, kw_only=True)


def with_rest(counts: Tensor, budget: int) -> Tensor:
    """Return (H,) most entries of heads with `counts` (H,).

    Each gets an equal part of what all leave of `budget` each.
    """
    return counts + (len(counts) * budget - counts.sum()).clamp(min=0) // len(counts)
