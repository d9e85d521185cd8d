"""Entries of every region, on the host and in the copy that the decode kernel writes to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
