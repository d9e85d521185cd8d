"""Runs of pages in a buffer for a disk: packed with a checksum, and checked and unpacked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
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
    begin, tensors = 0, pages.empty(len(ids))
    move_rows(pages, ids, RowArrays.of_tensors(tensors), None, len(ids))
    for rows in tensors:
        room[begin : begin + rows.nbytes] = rows.reshape(-1).view(torch.uint8)
        begin += rows.nbytes
    room[begin:] = 0
    return crc32(room[:begin], generation)


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
        arrays = _views(data, place, n_pages, pages.arenas)
        if crc32(data[place : place + sum(rows.nbytes for rows in arrays)], generation) != checksum:
            return n
        part = slice(bounds[n], bounds[n + 1])
        found_here = [rows[torch.from_numpy(wanted.rows[part])] for rows in arrays]
        move_rows(RowArrays.of_tensors(found_here), None, pages, wanted.ids[part], bounds[n + 1] - bounds[n])
    return len(runs.places)


def _views(data: Tensor, place: int, n_pages: int, arenas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The arrays of a run, (n_pages, bytes of a page) uint8 each, of which torch makes numbers when they are put."""
    found = []
    for pieces in arenas:
        nbytes = n_pages * pieces[0][0].nbytes
        found.append(data[place : place + nbytes].clone().view(pieces[0].dtype).reshape(n_pages, *pieces[0].shape[1:]))
        place += nbytes
    return found
