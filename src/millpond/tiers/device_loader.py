"""Loader that fills slots of a device: from files through slots of the host, or from the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from millpond.errors import DataError
from millpond.tiers.backends.device import Copying, Device
from millpond.tiers.loader import Errand, Extent, Loader
from millpond.tiers.slots import Slot, SlotState


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
