"""Extents of one layer on a disk: runs of pages that are written once, and read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from millpond.errors import DataError
from millpond.kernels.checksum import crc32
from millpond.tiers.aligned import aligned_up
from millpond.tiers.files import WritableFile
from millpond.tiers.free_list import FreeList
from millpond.tiers.loader import Errand, Extent, Loader
from millpond.tiers.slots import Slot

#: Bytes by which a file grows at least.
GRAIN = 256 << 10
#: Runs that lie at most this many bytes apart are read together: these cost less than another request.
GAP = 64 << 10


class GrowingFile(WritableFile, Protocol):
    """What extents lie in."""

    def grow(self, nbytes: int) -> None:
        """Reserve more bytes at the end; a DataError where there are none."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class PageRun:
    """Some pages of one sequence that were written together, array after array.

    Attributes:
        offset, nbytes: in the file, multiples of `ALIGNMENT`. needed: bytes of the pages. n_pages: how many they were.
        checksum: CRC-32 of the pages, which begins with the `generation` of the run, so that pages of an earlier run at
            the same place are not taken for these. live: pages that are still held. written: the write.
    """

    offset: int
    nbytes: int
    needed: int
    n_pages: int
    generation: int
    checksum: int
    live: int
    written: Errand | None

    def lost(self) -> DataError | None:
        """Wait for the write; why it failed."""
        if self.written is not None and (error := self.written.finish()) is not None:
            return error
        self.written = None
        return None


@dataclass
class Transit:
    """What all layers read and write through.

    Attributes:
        reading, writing: slots of one size, each used in turn. bytes_read, bytes_written: so far.
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
        """Of a slot: no run is longer."""
        return len(self.writing[0].view)

    def slot_to_read(self) -> Slot:
        """The next one in turn."""
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
    """The runs of one layer in a file of its own.

    Args:
        transit: shared with other layers. grown: called with the bytes by which the file has grown.
    """

    def __init__(self, file: GrowingFile, transit: Transit, grown: Callable[[int], None] = lambda n: None) -> None:
        self.transit, self._grown = transit, grown
        self._file, self._space = file, FreeList()
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
        """Bytes by which the file must grow for a run of `nbytes`; 0 where there is a gap for it."""
        return self._space.lacking(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Let the file have at least `nbytes`.

        Raises:
            DataError: the disk lacks them; nothing was changed.
        """
        if (more := aligned_up(nbytes) - self._space.size) > 0:
            self._grow(more)

    def write(self, fill: Callable[[Tensor], None], needed: int, n_pages: int) -> PageRun:
        """A new run of pages.

        Args:
            fill: puts the bytes of the pages into (needed,) uint8.

        Raises:
            DataError: the disk is full. Another failure of the disk is in `PageRun.lost`.
        """
        assert 0 < needed <= self.transit.slot_bytes, "a run fits a slot"
        nbytes = aligned_up(needed)
        offset = self._space.take(nbytes)
        if offset is None:
            self._grow(max(self._space.lacking(nbytes), GRAIN))
            offset = self._space.take(nbytes)
            assert offset is not None, "the file has grown by what was lacking"
        self._generation += 1
        run = PageRun(offset, nbytes, needed, n_pages, self._generation, 0, n_pages, None)

        def filled(room: Tensor) -> None:
            fill(room[:needed])
            room[needed:] = 0
            run.checksum = _checksum(run, room[:needed])

        run.written = self.transit.write(filled, self._file, offset, nbytes)
        return run

    def free(self, run: PageRun) -> None:
        """None of its pages is held any more."""
        run.lost()  # a write under way must not come after that of another run at this place
        self._space.give_back(run.offset, run.nbytes)

    def read(
        self, runs: Iterable[PageRun], take: Callable[[PageRun, Tensor], None]
    ) -> list[tuple[Errand, list[PageRun]]]:
        """Read runs, neighbours together, and give the bytes of each to `take` in the background.

        Returns:
            What is waited for, and the runs that it reads. The error of an errand says that they are lost.
        """
        ordered = sorted(runs, key=lambda run: run.offset)
        parts: list[list[PageRun]] = []
        for run in ordered:
            last = parts[-1] if parts else None
            if (
                last is not None and run.offset - (last[-1].offset + last[-1].nbytes) <= GAP
                and run.offset + run.nbytes - last[0].offset <= self.transit.slot_bytes
            ):  # fmt: skip
                last.append(run)
            else:
                parts.append([run])
        return [(self._read(part, take), part) for part in parts]

    def _read(self, runs: list[PageRun], take: Callable[[PageRun, Tensor], None]) -> Errand:
        begin, end = runs[0].offset, runs[-1].offset + runs[-1].nbytes

        def split(data: Tensor) -> None:
            for run in runs:
                found = data[run.offset - begin : run.offset - begin + run.needed]
                if _checksum(run, found) != run.checksum:
                    raise DataError(
                        f"{self._file.path} at offset {run.offset:,}: {run.needed:,} bytes of KV are not those that "
                        f"were written (checksum {run.checksum:08x} of generation {run.generation}, read "
                        f"{_checksum(run, found):08x}); ask again, and check the disk"
                    )
                take(run, found)

        self.transit.bytes_read += end - begin
        extent = Extent(self._file, begin, end - begin, end - begin, 0)
        return self.transit.loader.hand_on(extent, self.transit.slot_to_read(), split)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _grow(self, nbytes: int) -> None:
        self._file.grow(nbytes)
        self._space.grow(nbytes)
        self._grown(nbytes)


def _checksum(run: PageRun, data: Tensor) -> int:
    return crc32(data, run.generation)
