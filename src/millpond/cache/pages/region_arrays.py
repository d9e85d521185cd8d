"""Lengths and budgets of every region of a page table, on the host and in the copies that kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels.decode_rules import UNBOUNDED
from millpond.kernels.transfers import ReadBack, on_device

Ints = npt.NDArray[np.int32]


class RegionLengths:
    """Lengths of regions, (R,) int32, on the host and in a copy on a device.

    On the CPU the two are one memory. Elsewhere a step may change lengths in a way that the host does not know. It then
    counts how many entries each region has got at most, and copies the lengths when somebody asks for them: `host`
    waits for all work of the device, `arrive` only for what was launched before the `look` that it ends.

    Args:
        lens: Lengths, (R,).

    Attributes:
        behind: Whether the device's lengths are newer than the host's, which are copied from it when next needed.
    """

    def __init__(self, lens: Ints) -> None:
        self._host = lens
        self._there = torch.from_numpy(lens)
        self.behind = False
        self._more = np.zeros_like(lens)  # entries that regions got at most since the host's lengths were right
        self._looks: list[tuple[ReadBack, Ints]] = []  # lengths on their way, and `_more` since then, the oldest first

    @property
    def host(self) -> Ints:
        """Lengths on the host, (R,), to read and to write in place; `publish` copies them to the device."""
        if self.behind:
            self._take(self._there)
        return self._host

    @property
    def known(self) -> Ints:
        """The last lengths that the host has known, (R,)."""
        return self._host

    @property
    def most(self) -> Ints:
        """Upper bounds of the lengths, (R,), to read, for which nothing waits."""
        return self._host + self._more if self.behind else self._host

    @property
    def drift(self) -> int:
        """By how many entries a bound may exceed a length that has not fallen."""
        return int(self._more.max(initial=0))

    def is_unsure(self, n: int) -> bool:
        """Return whether the host is unsure of the longest regions.

        Those count whose bounds are at most `n` entries below the largest.
        """
        most = self.most
        return bool(self._more[most >= most.max(initial=0) - n].any())

    def fell(self) -> None:
        """Note that the device may have made lengths smaller."""
        self.behind = True

    def grew(self, regions: npt.NDArray[np.bool_]) -> None:
        """Note that the device may have added an entry to each of some regions, (R,)."""
        self.behind = True
        self._more += regions
        for _, since in self._looks:
            since += regions

    def look(self, *, again: bool = False) -> None:
        """Copy the lengths to the host behind the work that was launched, for `arrive`.

        Nothing is done where lengths are on their way, unless `again`.
        """
        if self.behind and (again or not self._looks):
            self._looks.append((ReadBack([self._there.clone()]), np.zeros_like(self._more)))

    def arrive(self) -> bool:
        """Take the lengths of the last look after which a step was launched.

        Returns whether there was one. Who launches a step has read the tokens of the one before the last, so that this
        waits for nothing.
        """
        if not self._looks:
            return False
        arrived = sum(bool(since.any()) for _, since in self._looks)
        if arrived:
            read, self._more = self._looks[arrived - 1]
            self._host[:], self._looks = read.wait()[0].numpy(), self._looks[arrived:]
        return arrived > 0

    def publish(self, device: torch.device) -> Tensor:
        """Return the host's lengths on the device, (R,), which a kernel may write to."""
        self._there = on_device(self.host, device)
        return self._there

    def adopt(self, there: Tensor) -> None:
        """Take a copy of the host's lengths on the device, (R,), which a kernel may write to."""
        self._there = there

    def select(self, regions: npt.NDArray[np.int64]) -> None:
        """Keep the lengths of the given regions, in this order."""
        self._begin(self.host[regions])

    def join(self, other: RegionLengths) -> None:
        """Take the lengths of another table's regions, after these."""
        self._begin(np.concatenate([self.host, other.host]))

    def copy(self) -> RegionLengths:
        """Return a copy that is not yet published."""
        return RegionLengths(self.host.copy())

    def _begin(self, lens: Ints) -> None:
        self._host, self._more = lens, np.zeros_like(lens)

    def _take(self, lens: Tensor) -> None:
        self._host[:], self._more[:] = lens.cpu().numpy(), 0
        self.behind, self._looks = False, []


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
