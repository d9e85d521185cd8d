"""Eviction plan: the entries that one layer keeps of one sequence, and how many each head may hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.policy.merging import Merged

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Entries that one layer keeps of one sequence.

    Attributes:
        keep: (H, N) bool over the view's columns.
        caps: (H,) on the host, most entries that each head may hold from now on.
        merged: Columns of the view after those that leave were merged; None if they are dropped.
        standing: (H, N) float32 to store with the entries as their scores; None for those they were chosen by.
    """

    keep: Tensor
    caps: Counts
    merged: Merged | None = field(default=None, kw_only=True)
    standing: Tensor | None = field(default=None, kw_only=True)


def with_rest(counts: Counts, budget: int) -> Counts:
    """Return (H,) most entries of heads with `counts` (H,).

    Each gets an equal part of what all leave of `budget` each.
    """
    return counts + max(len(counts) * budget - int(counts.sum()), 0) // len(counts)
