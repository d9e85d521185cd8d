"""Interface of a device for a loader: it holds slots, and takes bytes of the host in the background."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from millpond.errors import DataError
from millpond.tiers.slots import Slot
from millpond.tiers.tier import Tier


class Copying(Protocol):
    """A copy to the device that is under way."""

    @property
    def done(self) -> bool:
        """Whether `finish` returns at once."""
        ...

    def finish(self) -> DataError | None:
        """Wait until the bytes are there; why they are not, or None."""
        ...


class Device(Protocol):
    """An accelerator, or what stands for one.

    Attributes:
        tier: its memory. where: of its tensors. bytes_copied: to it, so far.
    """

    tier: Tier
    where: torch.device
    bytes_copied: int

    def buffer(self, nbytes: int) -> Tensor:
        """(n,) uint8 on the device, n at least `nbytes`."""
        ...

    def pin(self, source: Tensor) -> None:
        """Make copies from `source` (n,) uint8 of the host fast; it stays where it is until `close`."""
        ...

    def fence(self, slot: Slot) -> None:
        """The next copy to this slot waits for all work that was given to the device before."""
        ...

    def copy(self, source: Tensor, slot: Slot, place: int = 0) -> Copying:
        """Begin to copy bytes (n,) uint8 of the host to a place in a slot; `source` stays as it is meanwhile."""
        ...

    def close(self) -> None:
        """End what it has begun, and unpin memory."""
        ...
