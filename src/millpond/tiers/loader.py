"""Loader that fills slots from files and writes them to files in the background, and reports failures."""

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
    """Run of bytes of a file, and where it goes in a slot.

    Attributes:
        file: File to read.
        offset: First byte in the file, a multiple of `ALIGNMENT`.
        nbytes: Bytes to read, a multiple of `ALIGNMENT`.
        needed: Bytes of these that must exist; the rest may be past the end of the file.
        place: First byte in the slot.
        checksum: CRC-32 of the `needed` bytes; None if they are not checked.
    """

    file: ReadableFile
    offset: int
    nbytes: int
    needed: int
    place: int
    checksum: int | None = None


class Backend(Protocol):
    """Executor of the tasks of a loader."""

    def submit(self, slot: int, task: Callable[[], None]) -> None:
        """Run a task later, after all earlier ones of its slot; slots are in no order."""
        ...

    def close(self) -> None:
        """Finish all submitted tasks, and end."""
        ...


class Ticket:
    """One read into a slot, to be waited for or cancelled."""

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
        """Wait for the filled slot, which the caller then uses until it releases it.

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
        """Free the slot. A read in progress ends first: the slot's next read comes after it."""
        self._cancelled = True
        self.slot.to(SlotState.FREE, of=(SlotState.LOADING,))

    def run(self) -> None:
        """Read the extents unless the ticket was cancelled; the backend calls this."""
        try:
            for extent in self._extents:
                self._read(extent)
        except BaseException as error:  # whatever it was, the slot does not count as read
            self._error = as_data_error(error)
        finally:
            self._done.set()

    def _read(self, extent: Extent) -> None:
        """Read an extent, a second time if its checksum differs."""
        crc = None
        for _ in range(_TRIES):
            for begin in range(0, extent.nbytes, REQUEST_BYTES):
                if self._cancelled:
                    return
                end = min(begin + REQUEST_BYTES, extent.nbytes)
                self._request(extent, begin, end)
            if extent.checksum is None:
                return
            crc = crc32(self.slot.data[extent.place : extent.place + extent.needed])
            if crc == extent.checksum:
                return
        raise DataError(
            f"{extent.file.path} at offset {extent.offset:,}: {extent.needed:,} bytes have the checksum "
            f"{crc:08x} instead of {extent.checksum:08x}; the file was damaged: remove it, so that it is made again"
        )

    def _request(self, extent: Extent, begin: int, end: int) -> None:
        buffer = self.slot.view[extent.place + begin : extent.place + end]
        needed = min(end, extent.needed) - begin
        transfer(extent.file.read_into, extent.file, extent.offset + begin, buffer, needed, "read")


class Errand:
    """One task of a backend to be waited for: a read that is passed on, or a write.

    Attributes:
        error: Error of the task; None while it is under way, or if it did not fail.
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
        """Wait until the task is over; return its `error`."""
        self._done.wait()
        return self.error

    def run(self) -> None:
        """Run the task; the backend calls this."""
        try:
            self._task()
        except BaseException as error:  # whatever it was, the one who waits gets it
            self.error = as_data_error(error)
        finally:
            self._done.set()


def as_data_error(error: BaseException) -> DataError:
    """Turn an exception of a backend's task into the error that its waiter gets."""
    if isinstance(error, DataError):
        return error
    wrapped = DataError(f"a task of the loader failed with {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def transfer(
    move: Callable[[int, memoryview], int], file: ReadableFile, offset: int, room: memoryview, needed: int, verb: str
) -> None:
    """Read or write a run of bytes, a second time if it fails.

    Args:
        move: Method of the file that reads or writes at an offset and returns how many bytes it moved.
        file: File named in the error.
        offset: First byte in the file.
        room: Memory to read to or write from.
        needed: Bytes that must be moved.
        verb: "read" or "written", for the error.

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
    """Loader that reads extents into slots and writes slots.

    A slot has one owner; order is kept within a slot only. One thread uses the loader; the backend's threads only fill
    slots.
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
        """Read up to a slot's bytes and pass them to `take` in the background.

        Other reads of the slot come after.

        Args:
            extent: Bytes to read, at most a slot's.
            slot: Slot used for the read; its owner only passes on what is read through it.
            take: Called with the needed bytes, (n,) uint8, which change after it returns. An exception of it is the
                error of the errand.
        """

        def task() -> None:
            buffer = slot.view[: extent.nbytes]
            transfer(extent.file.read_into, extent.file, extent.offset, buffer, extent.needed, "read")
            take(slot.data[: extent.needed])

        return self._errand(slot, task)

    def write(self, slot: Slot, file: WritableFile, offset: int, nbytes: int) -> Errand:
        """Write the first `nbytes` of a slot to a file.

        Nobody else may write to the slot meanwhile.
        """

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
