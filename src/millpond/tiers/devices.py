"""Devices that a loader fills: their interface, a simulated one, and the loader of their slots."""

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
    """Copy to a device that is under way."""

    @property
    def done(self) -> bool:
        """Whether `finish` returns at once."""
        ...

    def finish(self) -> DataError | None:
        """Wait until the bytes have arrived; return the error of the copy, or None."""
        ...


class Device(Protocol):
    """Accelerator, or its stand-in, whose memory a loader fills.

    Attributes:
        tier: Tier of its memory.
        where: Device of its tensors.
        bytes_copied: Bytes copied to it so far.
        bytes_down: Bytes of tensors that came down from it, see `down`.
    """

    tier: Tier
    where: torch.device
    bytes_copied: int
    bytes_down: int

    def buffer(self, nbytes: int) -> Tensor:
        """Return (n,) uint8 on the device, n at least `nbytes`."""
        ...

    def pin(self, source: Tensor) -> None:
        """Make copies from `source` (n,) uint8 of the host fast; it must not move until `close`."""
        ...

    def fence(self, slot: Slot) -> None:
        """Let the next copy to this slot wait for all work queued on the device before."""
        ...

    def copy(self, source: Tensor, slot: Slot, place: int = 0) -> Copying:
        """Begin to copy bytes (n,) uint8 of the host to `place` in a slot.

        `source` must not change before the copy ends.
        """
        ...

    def down(self, *tensors: Tensor) -> list[Tensor]:
        """Return copies of tensors of the device in the host's memory, complete."""
        ...

    def up(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host on the device, for kernels launched after."""
        ...

    def close(self) -> None:
        """End all copies, and unpin memory."""
        ...


class SimulatedDevice:
    """Stand-in for an accelerator, to whose memory data must be copied before use.

    It shows that copies, their order and the reuse of slots are right; it says nothing about the speed of a device.

    Args:
        capacity_bytes: Bytes of its memory; None for no limit.
        bytes_per_s: Bandwidth of copies; None for that of the host's memory.
        backend: Runs the copies; None for one thread.
        sleep: Waits so many seconds; tests pass their own.

    Attributes:
        bytes_copied: Bytes copied to it so far.
        bytes_down: Bytes of tensors that came down from it.
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
        self.bytes_copied = self.bytes_down = 0
        self._bytes_per_s, self._sleep = bytes_per_s, sleep
        self._backend = backend or ThreadBackend()

    def buffer(self, nbytes: int) -> Tensor:
        """Return (n,) uint8 of the host, n the next multiple of `ALIGNMENT`."""
        return aligned_buffer(nbytes)

    def pin(self, source: Tensor) -> None:
        """Do nothing: all memory is the host's."""

    def fence(self, slot: Slot) -> None:
        """Do nothing: a slot's reader has computed with it before it releases it."""

    def copy(self, source: Tensor, slot: Slot, place: int = 0) -> Errand:
        """Begin to copy bytes (n,) uint8 to `place` in a slot; `source` must not change meanwhile."""

        def task() -> None:
            began = time.perf_counter()
            slot.data[place : place + len(source)] = source
            self._take_time(len(source), began)

        self.bytes_copied += len(source)
        errand = Errand(task)
        self._backend.submit(id(slot), errand.run)
        return errand

    def down(self, *tensors: Tensor) -> list[Tensor]:
        """Return copies of tensors, so that nothing but copies passes from one side to the other."""
        self.bytes_down += sum(tensor.nbytes for tensor in tensors)
        return [self._crossed(tensor) for tensor in tensors]

    def up(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, as `down` does."""
        self.bytes_copied += tensor.nbytes
        return self._crossed(tensor)

    def _crossed(self, tensor: Tensor) -> Tensor:
        began = time.perf_counter()
        copied = tensor.clone(memory_format=torch.contiguous_format)
        self._take_time(tensor.nbytes, began)
        return copied

    def _take_time(self, nbytes: int, began: float) -> None:
        """Wait until a copy that began at a time has taken that of its bandwidth."""
        if self._bytes_per_s is not None:
            self._sleep(max(0.0, nbytes / self._bytes_per_s - (time.perf_counter() - began)))

    def close(self) -> None:
        """End the thread that copies."""
        self._backend.close()


class Arrival:
    """One slot of a device that is being filled; used like a `Ticket` of a loader."""

    def __init__(self, slot: Slot, errands: Sequence[Copying]) -> None:
        self.slot = slot
        self._errands = errands

    def wait(self) -> Slot:
        """Wait for the slot, which the caller then uses until it releases it.

        Raises:
            DataError: a read failed; the slot is free.
        """
        errors = self._finish()
        self.slot.to(SlotState.FREE if errors else SlotState.IN_USE, of=(SlotState.LOADING,))
        if errors:
            raise errors[0]
        return self.slot

    def cancel(self) -> None:
        """Free the slot once the copies on their way have ended."""
        self._finish()
        self.slot.to(SlotState.FREE, of=(SlotState.LOADING,))

    def _finish(self) -> list[DataError]:
        return [error for errand in self._errands if (error := errand.finish()) is not None]


class DeviceLoader:
    """Loader of slots of a device, by way of slots of the host.

    Args:
        loader: Reads the files.
        device: Device of the slots.
        through: Slots of the host that reads pass through, used in turn.
    """

    def __init__(self, loader: Loader, device: Device, through: Sequence[Slot]) -> None:
        self._loader, self._device, self._through = loader, device, through

    def read(self, extents: Sequence[Extent], slot: Slot) -> Arrival:
        """Begin to fill a free slot from files; each part is copied as soon as it is read."""
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
