"""Budgets and rules of every region: how many entries it may hold, and which of them stay."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels.decode_rules import UNBOUNDED

Ints = npt.NDArray[np.int32]


class RegionBudgets(NamedTuple):
    """The host's numbers, written in place; the device has them after `publish`."""

    capacities: Ints  #: (R,) int32 most entries a region may hold
    recent: Ints  #: (R,) int32 how many newest positions are protected
    head_rules: npt.NDArray[np.int64]  #: (R,) the rule of each region, 0 where heads have no rules of their own

    @classmethod
    def unbounded(cls, n: int) -> RegionBudgets:
        """Of `n` regions that may hold any number of entries."""
        return cls(np.full(n, UNBOUNDED, dtype=np.int32), np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int64))

    def publish(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Capacities, recent and head rules (R,) on the device: new tensors, by which a change can be seen."""
        capacities, recent, head_rules = (torch.from_numpy(numbers).to(device) for numbers in self)
        return capacities, recent, head_rules

    def select(self, regions: npt.NDArray[np.int64]) -> RegionBudgets:
        """Those of the given regions, in this order."""
        return RegionBudgets(self.capacities[regions], self.recent[regions], self.head_rules[regions])

    def join(self, other: RegionBudgets) -> RegionBudgets:
        """Those of another table's regions after these."""
        return RegionBudgets(
            np.concatenate([self.capacities, other.capacities]),
            np.concatenate([self.recent, other.recent]),
            np.concatenate([self.head_rules, other.head_rules]),
        )

    def copy(self) -> RegionBudgets:
        """The same numbers in arrays of their own."""
        return RegionBudgets(self.capacities.copy(), self.recent.copy(), self.head_rules.copy())
