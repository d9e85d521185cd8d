"""Extents of one layer on a disk: runs of pages written once and read whole, and the free space between."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.errors import DataError
from millpond.kernels.args import RunsInBuffer
from millpond.kernels.checksum import crc32
from millpond.tiers.buffers import Slot, aligned_up
from millpond.tiers.files import WritableFile
from millpond.tiers.loader import Errand, Extent, Loader

Numbers = npt.NDArray[np.int64]
#: Rows by which the table grows, beyond an eighth of those that there are.
_SPARE = 16


class RunTable:
    """Runs of pages of one sequence each, which were written together, array after array.

    The number of a run that was removed is used again.

    Attributes:
        columns: All figures, (7, n) int64; the other attributes are its rows.
        offset: First byte in the file, a multiple of `ALIGNMENT`.
        nbytes: Bytes in the file, a multiple of `ALIGNMENT`.
        needed: Bytes of the pages.
        n_pages: Pages that were written.
        generation: Seed of the checksum, so that pages of an earlier run at the same place are not taken for these.
        checksum: CRC-32 of the pages.
        live: Pages that are still held; 0 for a number that no run has.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._set(np.zeros((7, 0), dtype=np.int64))

    def _set(self, columns: Numbers) -> None:
        self.columns: Numbers = columns
        rows: list[Numbers] = [*columns]
        self.offset, self.nbytes, self.needed, self.n_pages, self.generation, self.checksum, self.live = rows

    @property
    def numbers(self) -> Numbers:
        """Numbers of all runs."""
        return np.flatnonzero(self.live)

    def add(self, offset: int, nbytes: int, needed: int, n_pages: int, generation: int) -> int:
        """Add a run, whose checksum is not known yet, and return its number."""
        if not self._free:
            n = self.columns.shape[1]
            more = n // 8 + _SPARE
            self._set(np.concatenate([self.columns, np.zeros((7, more), dtype=np.int64)], axis=1))
            self._free = [*range(n + more - 1, n - 1, -1)]
        number = self._free.pop()
        self.columns[:, number] = offset, nbytes, needed, n_pages, generation, 0, n_pages
        return number

    def remove(self, number: int) -> None:
        """Remove a run."""
        self.columns[:, number] = 0
        self._free.append(number)


class FreeList:
    """Free bytes of a space; the first gap that is large enough is taken.

    Attributes:
        size: Bytes of the space.
        used: Bytes of it that are taken.

    Example:
        >>> space = FreeList()
        >>> space.grow(100)
        >>> first, second = space.take(40), space.take(60)
        >>> space.give_back(first, 40)
        >>> space.take(30), space.take(20)
        (0, None)
    """

    def __init__(self) -> None:
        self.size = self.used = 0
        self._gaps: list[tuple[int, int]] = []  # begin and end, ascending, none next to another

    def take(self, nbytes: int) -> int | None:
        """Take `nbytes` that are free and return the first; None if no gap is large enough."""
        for place, (begin, end) in enumerate(self._gaps):
            if end - begin >= nbytes:
                self._gaps[place : place + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                self.used += nbytes
                return begin
        return None

    def give_back(self, begin: int, nbytes: int) -> None:
        """Free bytes that were taken."""
        self.used -= nbytes
        self._add(begin, begin + nbytes)

    def grow(self, nbytes: int) -> None:
        """Add `nbytes` free bytes at the end."""
        self._add(self.size, self.size + nbytes)
        self.size += nbytes

    def lacking(self, nbytes: int) -> int:
        """Return by how many bytes the space must grow before `take(nbytes)` finds a gap."""
        if any(end - begin >= nbytes for begin, end in self._gaps):
            return 0
        at_end = self._gaps[-1] if self._gaps and self._gaps[-1][1] == self.size else (0, 0)
        return nbytes - (at_end[1] - at_end[0])

    def _add(self, begin: int, end: int) -> None:
        place = bisect_left(self._gaps, (begin, end))
        if place < len(self._gaps) and self._gaps[place][0] == end:
            end = self._gaps.pop(place)[1]
        if place and self._gaps[place - 1][1] == begin:
            begin = self._gaps.pop(place - 1)[0]
        insort(self._gaps, (begin, end))


#: Bytes by which a file grows at least.
GRAIN = 256 << 10
#: Runs that lie at most this many bytes apart are read together: these cost less than another request.
GAP = 64 << 10


class GrowingFile(WritableFile, Protocol):
    """File of extents."""

    def grow(self, nbytes: int) -> None:
        """Reserve more bytes at the end; raise a DataError if there are none."""
        ...

    def close(self) -> None: ...


#: Called in the background with runs that were read, a slice of those that were wanted, with the bytes that they lie in
#: (good until it returns) and where. It checks the checksum of each run before it takes what is wanted of it, and
#: returns how many runs came before the first that has another one.
Take = Callable[[slice, Tensor, RunsInBuffer], int]


@dataclass
class Transit:
    """Loader and slots through which all layers read and write.

    Attributes:
        loader: Loader of all reads and writes.
        reading: Slots of one size to read into, used in turn.
        writing: Slots of the same size to write from, used in turn.
        bytes_read: Bytes read so far.
        bytes_written: Bytes written so far.
        turns: Reads so far, which choose the next slot.
    """

    loader: Loader
    reading: list[Slot]
    writing: list[Slot]
    bytes_read: int = 0
    bytes_written: int = 0
    turns: int = 0

    def __post_init__(self) -> None:
        self._writes: list[Errand | None] = [None] * len(self.writing)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot; no run is longer."""
        return len(self.writing[0].view)

    def slot_to_read(self) -> Slot:
        """Return the next slot in turn."""
        self.turns += 1
        return self.reading[self.turns % len(self.reading)]

    def write(self, fill: Callable[[Tensor], None], file: WritableFile, offset: int, nbytes: int) -> Errand:
        """Let `fill` put bytes into a slot as soon as one is free, and write them."""
        place = next((n for n, one in enumerate(self._writes) if one is None or one.done), 0)
        if (before := self._writes[place]) is not None:
            before.finish()
        slot = self.writing[place]
        fill(slot.data[:nbytes])
        errand = self._writes[place] = self.loader.write(slot, file, offset, nbytes)
        self.bytes_written += nbytes
        return errand


class LayerExtents:
    """Runs of one layer in a file of its own.

    Args:
        file: File of the layer.
        transit: Loader and slots, shared with other layers.
        grown: Function that is called with the bytes by which the file has grown.

    Attributes:
        runs: Figures of the runs.
    """

    def __init__(self, file: GrowingFile, transit: Transit, grown: Callable[[int], None] = lambda n: None) -> None:
        self.transit, self._grown = transit, grown
        self._file, self._space = file, FreeList()
        self.runs = RunTable()
        self._writes: dict[int, Errand] = {}  # of runs that were not yet seen to be written
        self._generation = 0

    @property
    def used(self) -> int:
        """Bytes of all runs."""
        return self._space.used

    @property
    def size(self) -> int:
        """Bytes of the file, free ones included."""
        return self._space.size

    def growth(self, nbytes: int) -> int:
        """Return by how many bytes the file must grow for a run of `nbytes`; 0 if a gap fits."""
        return self._space.lacking(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Grow the file to at least `nbytes`.

        Raises:
            DataError: the disk lacks them; nothing was changed.
        """
        if (more := aligned_up(nbytes) - self._space.size) > 0:
            self._grow(more)

    def write(self, fill: Callable[[Tensor, int], int], needed: int, n_pages: int) -> int:
        """Write a new run of pages and return its number.

        Args:
            fill: Function that puts `needed` bytes and then 0 into (n,) uint8, and returns the CRC-32 of these bytes
                that begins with the generation which it is given.
            needed: Bytes of the pages.
            n_pages: Pages of the run.

        Raises:
            DataError: the disk is full. `lost` reports other failures of the disk.
        """
        assert 0 < needed <= self.transit.slot_bytes, "a run fits a slot"
        nbytes = aligned_up(needed)
        offset = self._space.take(nbytes)
        if offset is None:
            self._grow(max(self._space.lacking(nbytes), GRAIN))
            offset = self._space.take(nbytes)
            assert offset is not None, "the file has grown by what was lacking"
        self._generation += 1
        number, generation = self.runs.add(offset, nbytes, needed, n_pages, self._generation), self._generation

        def filled(room: Tensor) -> None:
            self.runs.checksum[number] = fill(room, generation)

        self._writes[number] = self.transit.write(filled, self._file, offset, nbytes)
        return number

    def lost(self, runs: Numbers) -> dict[int, DataError]:
        """Wait until some runs are written; return the error of each that failed."""
        if not self._writes:
            return {}
        errors: dict[int, DataError] = {}
        for number in self._writes.keys() & set(runs.tolist()):
            error = self._writes[number].finish()
            if error is None:
                del self._writes[number]
            else:
                errors[number] = error
        return errors

    def free(self, number: int) -> None:
        """Free the space of a run of which no page is held any more."""
        write = self._writes.pop(number, None)
        if write is not None:
            write.finish()  # it must not come after that of another run at this place
        self._space.give_back(int(self.runs.offset[number]), int(self.runs.nbytes[number]))
        self.runs.remove(number)

    def in_order(self, runs: Numbers) -> Numbers:
        """Return the order of some runs (n,) by their offsets, (n,)."""
        return np.argsort(self.runs.offset[runs])

    def read(self, runs: Numbers, take: Take) -> list[tuple[Errand, slice]]:
        """Read runs, neighbours together, and pass their bytes to `take` in the background.

        Args:
            runs: Numbers of the runs, (n,), in the order of their offsets.
            take: Function that receives the bytes.

        Returns:
            Errands to wait for, and the slice of the runs that each reads. The error of an errand says that they are
            lost.
        """
        columns = self.runs.columns[:, runs]
        begins, ends = columns[0].tolist(), (columns[0] + columns[1]).tolist()
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)), "runs are read in order"
        errands, first, max_bytes = [], 0, self.transit.slot_bytes
        for n in range(1, len(begins) + 1):
            if n == len(begins) or begins[n] - ends[n - 1] > GAP or ends[n] - begins[first] > max_bytes:
                part = slice(first, n)
                errands.append((self._read(columns[:, part], part, take), part))
                first = n
        return errands

    def _read(self, columns: Numbers, part: slice, take: Take) -> Errand:
        offset, nbytes, needed, n_pages, generation, checksum, _ = columns
        begin = int(offset[0])
        length = int(offset[-1] + nbytes[-1]) - begin
        runs = RunsInBuffer(offset - begin, n_pages, generation, checksum)

        def checked(data: Tensor) -> None:
            n = take(part, data, runs)
            if n < len(offset):
                place = int(runs.places[n])
                actual = crc32(data[place : place + int(needed[n])], int(generation[n]))
                raise DataError(
                    f"{self._file.path} at offset {offset[n]:,}: {needed[n]:,} bytes of KV are not those that were "
                    f"written (checksum {checksum[n]:08x} of generation {generation[n]}, read {actual:08x}); ask "
                    "again, and check the disk"
                )

        self.transit.bytes_read += length
        extent = Extent(self._file, begin, length, length, 0)
        return self.transit.loader.hand_on(extent, self.transit.slot_to_read(), checked)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _grow(self, nbytes: int) -> None:
        self._file.grow(nbytes)
        self._space.grow(nbytes)
        self._grown(nbytes)
