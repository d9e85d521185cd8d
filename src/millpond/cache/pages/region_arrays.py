"""Lengths and budgets of every region of a page table, on the host and in the copies that kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels.decode_rules import UNBOUNDED
from millpond.kernels.transfers import on_device

Ints = npt.NDArray[np.int32]


class RegionLengths:
    """Lengths of regions, (R,) int32, on the host and in a copy on a device.

    On the CPU the two are one memory.

    Args:
        lens: Lengths, (R,).

    Attributes:
        behind: Whether the device's lengths are newer than the host's, which are copied from it when next needed.
    """

    def __init__(self, lens: Ints) -> None:
        self._host = lens
        self._there = torch.from_numpy(lens)
        self.behind = False

    @property
    def host(self) -> Ints:
        """Lengths on the host, (R,), to read and to write in place; `publish` copies them to the device."""
        if self.behind:
            self._host[:], self.behind = self._there.cpu().numpy(), False
        return self._host

    def publish(self, device: torch.device) -> Tensor:
        """Return the host's lengths on the device, (R,), which a kernel may write to."""
        self._there = on_device(self.host, device)
        return self._there

    def adopt(self, there: Tensor) -> None:
        """Take a copy of the host's lengths on the device, (R,), which a kernel may write to."""
        self._there = there

    def select(self, regions: npt.NDArray[np.int64]) -> None:
        """Keep the lengths of the given regions, in this order."""
        self._host = self.host[regions]

    def join(self, other: RegionLengths) -> None:
        """Take the lengths of another table's regions, after these."""
        self._host = np.concatenate([self.host, other.host])

    def copy(self) -> RegionLengths:
        """Return a copy that is not yet published."""
        return RegionLengths(self.host.copy())


class RegionBudgets(NamedTuple):
    """Budgets of regions on the host, written in place; `publish` copies them to the device."""

    capacities: Ints  #: (R,) int32 most entries a region may hold
    recent: Ints  #: (R,) int32 how many newest positions are protected
    head_rules: npt.NDArray[np.int64]  #: (R,) the rule of each region, 0 where heads have no rules of their own

    @classmethod
    def unbounded(cls, n: int) -> RegionBudgets:
        """Return the budgets of `n` regions that may hold any number of entries."""
        return cls(np.full(n, UNBOUNDED, dtype=np.int32), np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int64))

    def publish(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return capacities, recent and head rules (R,) on the device.

        They are new tensors, by which a change can be seen.
        """
        capacities, recent, head_rules = (on_device(numbers, device) for numbers in self)
        return capacities, recent, head_rules

    def select(self, regions: npt.NDArray[np.int64]) -> RegionBudgets:
        """Return the budgets of the given regions, in this order."""
        return RegionBudgets(self.capacities[regions], self.recent[regions], self.head_rules[regions])

    def join(self, other: RegionBudgets) -> RegionBudgets:
        """Return these budgets, then those of another table's regions."""
        return RegionBudgets(
            np.concatenate([self.capacities, other.capacities]),
            np.concatenate([self.recent, other.recent]),
            np.concatenate([self.head_rules, other.head_rules]),
        )

    def copy(self) -> RegionBudgets:
        """Return a copy in arrays of its own."""
        return RegionBudgets(self.capacities.copy(), self.recent.copy(), self.head_rules.copy())
