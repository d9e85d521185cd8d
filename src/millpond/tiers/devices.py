"""Interface of a device for a loader, a simulated device, and the loader that fills slots of a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from millpond.errors import DataError
from millpond.tiers.buffers import Slot, SlotState, aligned_buffer
from millpond.tiers.ledger import Tier
from millpond.tiers.loader import Backend, Errand, Extent, Loader
from millpond.tiers.threads import ThreadBackend


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


class SimulatedDevice:
    """What stands for an accelerator where there is none: what is computed from must be copied there first.

    It shows that copies, their order and the reuse of slots are right; it says nothing of the speed of a device.

    Args:
        capacity_bytes: of its memory; None: no limit. bytes_per_s: of copies; None: as fast as the host's memory.
        backend: who copies; None: one thread.

    Attributes:
        bytes_copied: to it, so far.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        bytes_per_s: float | None = None,
        backend: Backend | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.tier = Tier("device", "device", capacity_bytes)
        self.where = torch.device("cpu")
        self.bytes_copied = 0
        self._bytes_per_s, self._sleep = bytes_per_s, sleep
        self._backend = backend or ThreadBackend()

    def buffer(self, nbytes: int) -> Tensor:
        """(n,) uint8."""
        return aligned_buffer(nbytes)

    def pin(self, source: Tensor) -> None:
        """Nothing: all memory is the host's."""

    def fence(self, slot: Slot) -> None:
        """Nothing: who releases a slot has computed with it."""

    def copy(self, source: Tensor, slot: Slot, place: int = 0) -> Errand:
        """Begin to copy bytes (n,) uint8 of the host to a place in a slot of the device; `source` stays as it is."""

        def task() -> None:
            began = time.perf_counter()
            slot.data[place : place + len(source)] = source
            if self._bytes_per_s is not None:
                self._sleep(max(0.0, len(source) / self._bytes_per_s - (time.perf_counter() - began)))

        self.bytes_copied += len(source)
        errand = Errand(task)
        self._backend.submit(id(slot), errand.run)
        return errand

    def close(self) -> None:
        """End its thread."""
        self._backend.close()


class Arrival:
    """One slot of a device that is being filled; used as a `Ticket` of a loader."""

    def __init__(self, slot: Slot, errands: Sequence[Copying]) -> None:
        self.slot = slot
        self._errands = errands

    def wait(self) -> Slot:
        """The slot, in use by the caller until it is released.

        Raises:
            DataError: a read failed; the slot is free.
        """
        errors = self._finish()
        self.slot.to(SlotState.FREE if errors else SlotState.IN_USE, of=(SlotState.LOADING,))
        if errors:
            raise errors[0]
        return self.slot

    def cancel(self) -> None:
        """Give the slot up, when what is on its way there has come."""
        self._finish()
        self.slot.to(SlotState.FREE, of=(SlotState.LOADING,))

    def _finish(self) -> list[DataError]:
        return [error for errand in self._errands if (error := errand.finish()) is not None]


class DeviceLoader:
    """Fills slots of a device.

    Args:
        loader: reads the files. through: slots of the host that reads pass, each used in turn.
    """

    def __init__(self, loader: Loader, device: Device, through: Sequence[Slot]) -> None:
        self._loader, self._device, self._through = loader, device, through

    def read(self, extents: Sequence[Extent], slot: Slot) -> Arrival:
        """Begin to fill a free slot from files: each part is copied as soon as it was read."""
        slot.to(SlotState.LOADING, of=(SlotState.FREE,))
        self._device.fence(slot)
        errands: list[Errand] = []
        step = len(self._through[0].view)
        for extent in extents:
            for begin in range(0, extent.nbytes, step):
                n = min(step, extent.nbytes - begin)
                needed = max(0, min(n, extent.needed - begin))
                offset, place = extent.offset + begin, extent.place + begin
                part = replace(extent, offset=offset, nbytes=n, needed=needed, place=place)
                errands.append(self._pass_on(part, slot, self._through[len(errands) % len(self._through)]))
        return Arrival(slot, errands)

    def copy(self, source: Tensor, slot: Slot) -> Arrival:
        """Begin to fill a free slot from the host's memory."""
        slot.to(SlotState.LOADING, of=(SlotState.FREE,))
        self._device.fence(slot)
        return Arrival(slot, [self._device.copy(source, slot)])

    def _pass_on(self, extent: Extent, slot: Slot, through: Slot) -> Errand:
        def take(data: Tensor) -> None:
            error = self._device.copy(data, slot, extent.place).finish()
            if error is not None:
                raise error

        return self._loader.hand_on(extent, through, take)
