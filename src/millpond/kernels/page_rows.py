"""Rows of pages in arenas, moves between such arrays, and runs of pages in a buffer for a disk, with a checksum."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels.args import RunsInBuffer, WantedPages
from millpond.kernels.checksum import crc32
from millpond.kernels.eager.pages import put_rows, take_rows
from millpond.kernels.native import library
from millpond.kernels.native import pages as native_pages
from millpond.kernels.pages import Arenas

Rows = npt.NDArray[np.integer[Any]]
#: Rows per arena of arrays that lie in one piece.
_ONE_PIECE = 1 << 62


class PagePart(Enum):
    """Part of a page: keys and values, or codes; positions, scores and masses; or all."""

    CONTENTS = "contents"
    SIDES = "sides"
    ALL = "all"


@dataclass(frozen=True, slots=True, eq=False)
class RowArrays:
    """Arrays of as many rows each, in arenas of equal size, the last of which may be shorter.

    Attributes:
        arenas: Tensors (per_arena, ...) of each array.
        per_arena: Rows of an arena, a power of two.
        row_bytes: Bytes of a row of each array; empty if they were not counted.
        numbers: Struct of the native kernels; None if they do not serve these arrays.
        memory: Memory that `numbers` points to besides the arenas.
    """

    arenas: Sequence[Sequence[Tensor]]
    per_arena: int
    row_bytes: tuple[int, ...] = ()
    numbers: tuple[int, ...] | None = None
    memory: tuple[Tensor, ...] = ()

    @classmethod
    def of_pages(cls, arrays: Arenas, part: PagePart) -> RowArrays:
        """Return the pages of a pool, a row for each; valid until the pool has other arenas."""
        return arrays.derived(part, lambda: cls._of_pages(arrays, part))

    @classmethod
    def of_slots(cls, arrays: Arenas) -> RowArrays:
        """Return the slots of a pool's pages of natural rows, keys and values.

        Slot s of page p is row `p * slots + s`.
        """
        return arrays.derived(RowArrays.of_slots, lambda: cls._of_slots(arrays))

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> RowArrays:
        """Return tensors (n, ...) of as many rows each as arrays."""
        arenas = [[x] for x in tensors]
        if not all(x.is_cpu and x.is_contiguous() for x in tensors):
            return cls(arenas, _ONE_PIECE)
        n, row_bytes = len(tensors), tuple(map(_row_bytes, tensors))
        table = torch.tensor([*(x.data_ptr() for x in tensors), *range(n), *row_bytes])
        begin = table.data_ptr()
        numbers = (begin, begin + 8 * n, begin + 16 * n, n, 1, _ONE_PIECE)
        return cls(arenas, _ONE_PIECE, row_bytes, numbers, (table,))

    @classmethod
    def _of_pages(cls, arrays: Arenas, part: PagePart) -> RowArrays:
        sides = [arrays.positions, arrays.scores, *([arrays.log_masses] if arrays.masses else [])]
        contents = arrays.contents
        selected = [
            *(contents if part is not PagePart.SIDES else []),
            *(sides if part is not PagePart.CONTENTS else []),
        ]
        in_bases = [*range(len(contents) if part is not PagePart.SIDES else 0)]
        in_bases += range(2, 2 + len(sides)) if part is not PagePart.CONTENTS else []
        return cls._of(selected, arrays.pages_per_arena, arrays, in_bases)

    @classmethod
    def _of_slots(cls, arrays: Arenas) -> RowArrays:
        slots = arrays.slots
        flat = [[arena.flatten(0, 1) for arena in arenas] for arenas in arrays.contents]
        return cls._of(flat, arrays.pages_per_arena * slots, arrays, [*range(len(flat))])

    @classmethod
    def _of(cls, arenas: list[list[Tensor]], per_arena: int, arrays: Arenas, in_bases: list[int]) -> RowArrays:
        """Return the arrays of a pool.

        Args:
            arenas: Arenas of each array.
            per_arena: Rows of an arena.
            arrays: Arenas of the pool.
            in_bases: Rows of `bases` with the addresses of the arrays.
        """
        if arrays.device.type != "cpu" or not arrays.n_arenas:
            return cls(arenas, per_arena)
        n, row_bytes = len(arenas), tuple(_row_bytes(pieces[0]) for pieces in arenas)
        table = torch.tensor([*in_bases, *row_bytes])
        begin, bases = table.data_ptr(), arrays.bases
        numbers = (bases.data_ptr(), begin, begin + 8 * n, n, bases.shape[1], per_arena)
        return cls(arenas, per_arena, row_bytes, numbers, (table, bases))

    def empty(self, n: int) -> list[Tensor]:
        """Return CPU tensors (n, ...) for rows of each array; (0,) of arrays without arenas."""
        return [
            torch.empty(n, *pieces[0].shape[1:], dtype=pieces[0].dtype) if pieces else torch.empty(0)
            for pieces in self.arenas
        ]


def move_rows(source: RowArrays, source_rows: Rows | None, target: RowArrays, target_rows: Rows | None, n: int) -> None:
    """Copy rows of one group of arrays into rows of another; Python's lock is free meanwhile.

    Args:
        source: Arrays to read.
        source_rows: (n,) rows to read; None for the first n.
        target: Arrays to write.
        target_rows: (n,) rows to write, all different; None for the first n.
        n: Number of rows.
    """
    if not n:
        return
    if source.numbers is not None and target.numbers is not None and serves():
        assert source.row_bytes == target.row_bytes, "rows of one size"
        native_pages.move(source.numbers, source_rows, target.numbers, target_rows, n)
        return
    for pieces, others in zip(source.arenas, target.arenas, strict=True):
        _put(others, target.per_arena, target_rows, _taken(pieces, source.per_arena, source_rows, n))


def take(source: RowArrays, rows: Rows) -> list[Tensor]:
    """Return rows (n,) of each array on the CPU, as a copy (n, ...).

    (0,) of arrays that never had an arena.
    """
    rows_read = source.empty(len(rows))
    if all(source.arenas):
        move_rows(source, rows, RowArrays.of_tensors(rows_read), None, len(rows))
    return rows_read


def serves() -> bool:
    """Whether native kernels move rows on the CPU."""
    return os.environ.get("MILLPOND_KERNELS", "auto") != "reference" and library.load() is not None


def _row_bytes(rows: Tensor) -> int:
    return prod(rows.shape[1:]) * rows.element_size()


def _by_arena(per_arena: int, rows: Rows) -> list[tuple[int, Rows, Rows]]:
    """Yield each arena with some of the rows: its number, their indices and rows in it."""
    rows = rows.astype(np.int64)
    arenas = rows // per_arena
    places = ((arena, np.flatnonzero(arenas == arena)) for arena in np.unique(arenas).tolist())
    return [(arena, which, rows[which] % per_arena) for arena, which in places]


def _taken(pieces: Sequence[Tensor], per_arena: int, rows: Rows | None, n: int) -> Tensor:
    rows = np.arange(n) if rows is None else rows
    parts = _by_arena(per_arena, rows)
    if len(parts) == 1:
        return take_rows(pieces[parts[0][0]], parts[0][2])
    rows_read = torch.empty(n, *pieces[0].shape[1:], dtype=pieces[0].dtype)
    for arena, which, there in parts:
        put_rows(rows_read, which, take_rows(pieces[arena], there))
    return rows_read


def _put(pieces: Sequence[Tensor], per_arena: int, rows: Rows | None, content: Tensor) -> None:
    rows = np.arange(len(content)) if rows is None else rows
    for arena, which, there in _by_arena(per_arena, rows):
        put_rows(pieces[arena], there, content, which)


Numbers = npt.NDArray[np.int64]


def pack_run(pages: RowArrays, ids: Rows, buffer: Tensor, generation: int) -> int:
    """Put pages into a buffer, array after array, and 0 into the rest of it.

    Args:
        pages: Pages of a pool.
        ids: (n,) pages to pack.
        buffer: (m,) uint8, contiguous, at least the bytes of the pages.
        generation: Start value of the checksum.

    Returns:
        CRC-32 of the bytes of the pages.
    """
    if pages.numbers is not None and serves():
        checked = native_pages.pack(pages.numbers, ids, buffer, generation)
        if checked >= 0:
            return checked
    views = _views(buffer, 0, len(ids), pages)
    move_rows(pages, ids, RowArrays.of_tensors(views), None, len(ids))
    needed = sum(rows.nbytes for rows in views)
    buffer.numpy()[needed:] = 0
    return crc32(buffer[:needed], generation)


def unpack_runs(data: Tensor, runs: RunsInBuffer, pages: RowArrays, wanted: WantedPages, first: Numbers) -> int:
    """Check runs, and put their wanted pages into a pool; Python's lock is free meanwhile.

    Args:
        data: (m,) uint8, contiguous.
        runs: Runs in the buffer.
        pages: Pages of the pool.
        wanted: Pages to put into the pool.
        first: (n + 1,) int64, first index in `wanted` of each run, and the end of the last.

    Returns:
        How many runs came before the first whose checksum is another one; nothing of that and later ones was taken.
    """
    if pages.numbers is not None and serves():
        checked = native_pages.unpack(data, runs, pages.numbers, wanted, first)
        if checked >= 0:
            return checked
    bounds = first.tolist()
    for n, (place, n_pages, generation, checksum) in enumerate(zip(*(x.tolist() for x in runs), strict=True)):
        views = _views(data, place, n_pages, pages)
        if crc32(data[place : place + sum(rows.nbytes for rows in views)], generation) != checksum:
            return n
        part = slice(bounds[n], bounds[n + 1])
        move_rows(RowArrays.of_tensors(views), wanted.rows[part], pages, wanted.ids[part], part.stop - part.start)
    return len(runs.places)


def _views(data: Tensor, place: int, n_pages: int, pages: RowArrays) -> list[Tensor]:
    """Return the arrays of a run that begins at a place, (n_pages, bytes of a page) uint8."""
    runs_of_pages = []
    for pieces in pages.arenas:
        assert pieces[0].is_cpu, "a disk is read into the host's memory, byte by byte"
        nbytes = pieces[0][0].nbytes
        runs_of_pages.append(data[place : place + n_pages * nbytes].view(n_pages, nbytes))
        place += n_pages * nbytes
    return runs_of_pages
