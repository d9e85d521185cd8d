"""Loader: fills slots from files in the background, and says when and whether it could."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.errors import DataError
from millpond.tiers.files import ReadableFile
from millpond.tiers.slots import Slot, SlotState

#: Bytes of one request: above 256 KiB a disk's bandwidth no longer grows.
REQUEST_BYTES = 4 << 20
#: How often a request is made before its ticket fails.
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of a file that goes to a place in a slot.

    Attributes:
        offset, nbytes: in the file, multiples of `ALIGNMENT`. needed: bytes of these that there must be; the others may
            lie behind the end of the file. place: in the slot. checksum: CRC-32 of the `needed` bytes; None: not
            checked.
    """

    file: ReadableFile
    offset: int
    nbytes: int
    needed: int
    place: int
    checksum: int | None = None


class Backend(Protocol):
    """Who carries out reads."""

    def submit(self, slot: int, task: Callable[[], None]) -> None:
        """Run a task later, after all earlier ones of the same slot; of different slots in any order."""
        ...

    def close(self) -> None:
        """Finish what was submitted, and end."""
        ...


class Ticket:
    """One read into a slot, which is waited for or cancelled."""

    def __init__(self, slot: Slot, extents: Sequence[Extent]) -> None:
        self.slot = slot
        self._extents = extents
        self._done = threading.Event()
        self._cancelled = False
        self._error: DataError | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._done.is_set()

    def wait(self) -> Slot:
        """The slot with what was read, in use by the caller until it is released.

        Raises:
            DataError: the read failed; the message has the file, the offset, the bytes wanted and got. The slot is
                free.
        """
        assert not self._cancelled, "a cancelled read is not waited for"
        self._done.wait()
        if self._error is not None:
            self.slot.to(SlotState.FREE, of=(SlotState.LOADING,))
            raise self._error
        self.slot.to(SlotState.IN_USE, of=(SlotState.LOADING,))
        return self.slot

    def cancel(self) -> None:
        """Give the slot up. A read in progress ends first: the next one of the slot comes after it."""
        self._cancelled = True
        self.slot.to(SlotState.FREE, of=(SlotState.LOADING,))

    def run(self) -> None:
        """Read, unless it was cancelled; the backend calls it."""
        try:
            for extent in self._extents:
                self._read(extent)
        except DataError as error:
            self._error = error
        finally:
            self._done.set()

    def _read(self, extent: Extent) -> None:
        for begin in range(0, extent.nbytes, REQUEST_BYTES):
            if self._cancelled:
                return
            end = min(begin + REQUEST_BYTES, extent.nbytes)
            self._request(extent, begin, end)
        if extent.checksum is not None:
            self._check(extent, extent.checksum)

    def _check(self, extent: Extent, checksum: int) -> None:
        found = zlib.crc32(self.slot.view[extent.place : extent.place + extent.needed])
        if found != checksum:
            raise DataError(
                f"{extent.file.path} at offset {extent.offset:,}: {extent.needed:,} bytes have the checksum "
                f"{found:08x} instead of {checksum:08x}; the file was damaged: remove it, so that it is made again"
            )

    def _request(self, extent: Extent, begin: int, end: int) -> None:
        room = self.slot.view[extent.place + begin : extent.place + end]
        needed = min(end, extent.needed) - begin
        got, reason = 0, ""
        for _ in range(_TRIES):
            try:
                got = extent.file.read_into(extent.offset + begin, room)
            except OSError as error:
                reason = f": {error.strerror or error}"
            else:
                reason = ""
                if got >= needed:
                    return
        raise DataError(
            f"{extent.file.path} at offset {extent.offset + begin:,}: {end - begin:,} bytes wanted, {needed:,} of them "
            f"needed, {got:,} read in each of {_TRIES} tries{reason}; check the disk, and that the file is whole"
        )


class Loader:
    """Reads extents into slots. A slot has one owner; order is kept within a slot only.

    One thread uses it; the backend's threads only fill slots.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def read(self, extents: Sequence[Extent], slot: Slot) -> Ticket:
        """Begin to fill a free slot."""
        slot.to(SlotState.LOADING, of=(SlotState.FREE,))
        ticket = Ticket(slot, extents)
        self._backend.submit(id(slot), ticket.run)
        return ticket

    def close(self) -> None:
        """End the backend."""
        self._backend.close()
