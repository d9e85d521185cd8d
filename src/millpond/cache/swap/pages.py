"""Swap of a sequence: the content of its pages moves out of the pool and back, bit for bit.

A cache that chose its entries by a question cannot be computed again from its text. So a preempted
sequence is moved to the host's memory or to files (see `SwapFiles`), outside the pool's limit, and continues later as
if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.swap.rows import Rows, put_rows, take_rows

#: What holds pages: the plain part of a table, or a packed one.
Holder = PageTable | QuantizedStore
#: What pages hold, (n, ...) per array of their pool.
Content = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """The pages of one part of a table outside its pool.

    Attributes:
        pool: where they were. owned: (R,) pages per region. arrays: the content of all pages, on the host.
    """

    pool: RefCountedPool[Any]
    owned: npt.NDArray[Any]
    arrays: Content

    @property
    def n_pages(self) -> int:
        return int(self.owned.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return sum(array.nbytes for array in self.arrays)


def copy_out(table: PageTable) -> list[Content]:
    """The content of the table's pages, on the host, for each of its parts."""
    return [read_pages(part.pool, part.held()) for part in parts_of(table)]


def release_all(table: PageTable, content: list[Content]) -> list[SwappedPages]:
    """Give the table's pages back; afterwards it may only be swapped in, or cleared. `content`: from `copy_out`."""
    return [SwappedPages(part.pool, part.release_all(), c) for part, c in zip(parts_of(table), content, strict=True)]


def restore(table: PageTable, carried: list[SwappedPages]) -> None:
    """Put the content into fresh pages, which the table holds again.

    Raises:
        PoolFullError: there is no room; nothing was changed.
    """
    taken: list[PageIds] = []
    try:
        for one in carried:
            taken.append(one.pool.allocate(one.n_pages))
    except BaseException:
        for one, ids in zip(carried, taken, strict=False):
            one.pool.release(ids)
        raise
    for part, one, ids in zip(parts_of(table), carried, taken, strict=True):
        write_pages(one.pool, ids, one.arrays)
        part.restore(ids, one.owned)


def read_pages(pool: RefCountedPool[Any], ids: PageIds, arrays: list[list[Tensor]] | None = None) -> Content:
    """The content of the pages: of all arrays of the pool, or of some."""
    found, places_of = [], _by_arena(pool, ids)
    for arenas in pool.arrays.arrays if arrays is None else arrays:
        if not arenas:  # nothing was ever held
            found.append(torch.empty(0))
        elif len(places_of) == 1:
            ((arena, _, rows),) = places_of
            found.append(take_rows(arenas[arena], rows))
        else:
            out = torch.empty(len(ids), *arenas[0].shape[1:], dtype=arenas[0].dtype)
            for arena, places, rows in places_of:
                put_rows(out, places, take_rows(arenas[arena], rows))
            found.append(out)
    return tuple(found)


def write_pages(
    pool: RefCountedPool[Any], ids: PageIds, content: Content, arrays: list[list[Tensor]] | None = None
) -> None:
    """Give the pages the content that `read_pages` returned of others, of the same arrays."""
    places_of = _by_arena(pool, ids)
    for arenas, rows_of in zip(pool.arrays.arrays if arrays is None else arrays, content, strict=True):
        for arena, places, rows in places_of:
            put_rows(arenas[arena], rows, rows_of, None if len(places_of) == 1 else places)


def parts_of(table: PageTable) -> list[Holder]:
    """What holds the pages of a table: its plain part, then its packed ones."""
    return [table, *table.packed_parts]


def _by_arena(pool: RefCountedPool[Any], ids: PageIds) -> list[tuple[int, Rows, Rows]]:
    """For each arena that holds some of the pages: its number, which of `ids` (n,), and their rows in it."""
    per_arena = pool.arrays.pages_per_arena
    arenas = ids // per_arena
    found: list[tuple[int, Rows, Rows]] = []
    for arena in range(int(arenas.min(initial=0)), int(arenas.max(initial=-1)) + 1):
        places = np.flatnonzero(arenas == arena)
        if len(places):
            found.append((arena, places, (ids if len(places) == len(ids) else ids[places]) % per_arena))
    return found
