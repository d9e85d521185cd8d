"""Loader: fills slots from files and writes them to files in the background, and says when and whether it could."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from millpond.errors import DataError
from millpond.kernels.checksum import crc32
from millpond.tiers.buffers import Slot, SlotState
from millpond.tiers.files import ReadableFile, WritableFile

#: Bytes of one request of a file, see `read_file`. After each the reading thread waits for Python's lock, up to 5 ms
#: where the model's thread has it. A request that is cancelled ends first.
REQUEST_BYTES = 32 << 20
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
        except BaseException as error:  # whatever it was, the slot does not count as read
            self._error = as_data_error(error)
        finally:
            self._done.set()

    def _read(self, extent: Extent) -> None:
        """Read an extent; once more where its checksum is another one."""
        found = None
        for _ in range(_TRIES):
            for begin in range(0, extent.nbytes, REQUEST_BYTES):
                if self._cancelled:
                    return
                end = min(begin + REQUEST_BYTES, extent.nbytes)
                self._request(extent, begin, end)
            if extent.checksum is None:
                return
            found = crc32(self.slot.data[extent.place : extent.place + extent.needed])
            if found == extent.checksum:
                return
        raise DataError(
            f"{extent.file.path} at offset {extent.offset:,}: {extent.needed:,} bytes have the checksum "
            f"{found:08x} instead of {extent.checksum:08x}; the file was damaged: remove it, so that it is made again"
        )

    def _request(self, extent: Extent, begin: int, end: int) -> None:
        room = self.slot.view[extent.place + begin : extent.place + end]
        needed = min(end, extent.needed) - begin
        transfer(extent.file.read_into, extent.file, extent.offset + begin, room, needed, "read")


class Errand:
    """One task of a backend that is waited for: a read that is handed on, or a write.

    Attributes:
        error: why it failed; None while it is under way, or where it did not.
    """

    def __init__(self, task: Callable[[], None]) -> None:
        self._task = task
        self._done = threading.Event()
        self.error: DataError | None = None

    @property
    def done(self) -> bool:
        """Whether `finish` returns at once."""
        return self._done.is_set()

    def finish(self) -> DataError | None:
        """Wait until it is over; returns its `error`."""
        self._done.wait()
        return self.error

    def run(self) -> None:
        """The backend calls it."""
        try:
            self._task()
        except BaseException as error:  # whatever it was, the one who waits gets it
            self.error = as_data_error(error)
        finally:
            self._done.set()


def as_data_error(error: BaseException) -> DataError:
    """What a task of a backend has raised, for the one who waits for it."""
    if isinstance(error, DataError):
        return error
    found = DataError(f"a task of the loader failed with {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def transfer(
    move: Callable[[int, memoryview], int], file: ReadableFile, offset: int, room: memoryview, needed: int, verb: str
) -> None:
    """Read or write, once more where it fails.

    Args:
        move: of the file: reads or writes at an offset, and returns how many bytes. needed: that it must be.

    Raises:
        DataError: it failed twice; the message has the file, the offset, the bytes wanted and got.
    """
    got, reason = 0, ""
    for _ in range(_TRIES):
        try:
            got = move(offset, room)
        except OSError as error:
            reason = f": {error.strerror or error}"
        else:
            reason = ""
            if got >= needed:
                return
    raise DataError(
        f"{file.path} at offset {offset:,}: {len(room):,} bytes wanted, {needed:,} of them needed, {got:,} {verb} in "
        f"each of {_TRIES} tries{reason}; check the disk, and that the file is whole"
    )


class Loader:
    """Reads extents into slots and writes slots. A slot has one owner; order is kept within a slot only.

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

    def hand_on(self, extent: Extent, slot: Slot, take: Callable[[Tensor], None]) -> Errand:
        """Read at most a slot's bytes, and give them to `take` in the background; other reads of the slot come after.

        Args:
            slot: whose owner only hands on what is read through it.
            take: called with (n,) uint8, the bytes that were needed, which are others after it has returned. What it
                raises is the error of the errand.
        """

        def task() -> None:
            room = slot.view[: extent.nbytes]
            transfer(extent.file.read_into, extent.file, extent.offset, room, extent.needed, "read")
            take(slot.data[: extent.needed])

        return self._errand(slot, task)

    def write(self, slot: Slot, file: WritableFile, offset: int, nbytes: int) -> Errand:
        """Write the first `nbytes` of a slot; its owner lets no one else write there before that is over."""

        def task() -> None:
            transfer(file.write_from, file, offset, slot.view[:nbytes], nbytes, "written")

        return self._errand(slot, task)

    def _errand(self, slot: Slot, task: Callable[[], None]) -> Errand:
        errand = Errand(task)
        self._backend.submit(id(slot), errand.run)
        return errand

    def close(self) -> None:
        """End the backend."""
        self._backend.close()
