"""Lengths and budgets of every region of a page table, on the host and in the copies that kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels.decode_rules import UNBOUNDED

Ints = npt.NDArray[np.int32]


class RegionLengths:
    """(R,) int32 lengths: the host's, and their copy on a device (on the CPU the two are one memory).

    Attributes:
        behind: the device's lengths are newer than the host's, which are read from it when next needed.
    """

    def __init__(self, lens: Ints) -> None:
        self._host = lens
        self._there = torch.from_numpy(lens)
        self.behind = False

    @property
    def host(self) -> Ints:
        """(R,) the lengths on the host, to read and to write in place; the device has them after `publish`."""
        if self.behind:
            self._host[:], self.behind = self._there.cpu().numpy(), False
        return self._host

    def publish(self, device: torch.device) -> Tensor:
        """(R,) the host's lengths on the device, which a kernel may write to."""
        self._there = torch.from_numpy(self.host).to(device)
        return self._there

    def select(self, regions: npt.NDArray[np.int64]) -> None:
        """Become the lengths of the given regions, in this order."""
        self._host = self.host[regions]

    def join(self, other: RegionLengths) -> None:
        """Take over the lengths of another table's regions, after these."""
        self._host = np.concatenate([self.host, other.host])

    def copy(self) -> RegionLengths:
        """The same lengths, not yet published."""
        return RegionLengths(self.host.copy())


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
