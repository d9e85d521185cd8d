"""Runs of pages in a buffer for a disk: packed with a checksum, and checked and unpacked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.kernels.args.runs import RunsInBuffer, WantedPages
from millpond.kernels.checksum import crc32
from millpond.kernels.native import page_rows
from millpond.kernels.page_rows import RowArrays, Rows, move_rows, serves

Numbers = npt.NDArray[np.int64]


def pack_run(pages: RowArrays, ids: Rows, room: Tensor, generation: int) -> int:
    """Put pages into a buffer, array after array, and 0 into what is left of it.

    Args:
        pages: of a pool. ids: (n,) which. room: (m,) uint8, contiguous, at least the bytes of the pages.
        generation: what the checksum begins with.

    Returns:
        CRC-32 of the bytes of the pages.
    """
    if pages.numbers is not None and serves():
        found = page_rows.pack(pages.numbers, ids, room, generation)
        if found >= 0:
            return found
    views = _views(room, 0, len(ids), pages)
    move_rows(pages, ids, RowArrays.of_tensors(views), None, len(ids))
    needed = sum(rows.nbytes for rows in views)
    room.numpy()[needed:] = 0
    return crc32(room[:needed], generation)


def unpack_runs(data: Tensor, runs: RunsInBuffer, pages: RowArrays, wanted: WantedPages, first: Numbers) -> int:
    """Check runs, and put those pages of them that are wanted into a pool; Python's lock is free meanwhile.

    Args:
        data: (m,) uint8, contiguous. pages: of the pool. first: (n + 1,) int64, where what is `wanted` of each run
            begins and the last ends.

    Returns:
        How many runs came before the first whose checksum is another one; nothing of that and later ones was taken.
    """
    if pages.numbers is not None and serves():
        found = page_rows.unpack(data, runs, pages.numbers, wanted, first)
        if found >= 0:
            return found
    bounds = first.tolist()
    for n, (place, n_pages, generation, checksum) in enumerate(zip(*(x.tolist() for x in runs), strict=True)):
        views = _views(data, place, n_pages, pages)
        if crc32(data[place : place + sum(rows.nbytes for rows in views)], generation) != checksum:
            return n
        part = slice(bounds[n], bounds[n + 1])
        move_rows(RowArrays.of_tensors(views), wanted.rows[part], pages, wanted.ids[part], part.stop - part.start)
    return len(runs.places)


def _views(data: Tensor, place: int, n_pages: int, pages: RowArrays) -> list[Tensor]:
    """The arrays of a run that begins at a place, (n_pages, bytes of a page) uint8 each."""
    found = []
    for pieces in pages.arenas:
        assert pieces[0].is_cpu, "a disk is read into the host's memory, byte by byte"
        nbytes = pieces[0][0].nbytes
        found.append(data[place : place + n_pages * nbytes].view(n_pages, nbytes))
        place += n_pages * nbytes
    return found
