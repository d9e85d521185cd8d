"""Swapping a sequence out: the content of its pages leaves the pool, and comes back bit by bit.

A cache that chose what to keep by what was asked cannot be computed again from its text. So a sequence that must make
room is carried to the host's memory, outside the pool's limit, and goes on later as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.counted import CountedPages, PageIds
from millpond.cache.table import RegionTable


@dataclass(frozen=True, slots=True)
class Carried:
    """The pages of one table outside its pool.

    Attributes:
        owned: (R,) pages per region. arrays: the content of all pages, (n, slots, ...) per array of the pool, on the
            host.
    """

    owned: npt.NDArray[np.int64]
    arrays: tuple[Tensor, ...]

    @property
    def n_pages(self) -> int:
        return int(self.owned.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return sum(array.nbytes for array in self.arrays)


def carry_out(table: RegionTable) -> Carried:
    """Copy the table's pages to the host and give them back; the table may only be carried in, or cleared."""
    content = read_pages(table.pool, table.held())
    return Carried(table.give_up(), content)


def carry_in(table: RegionTable, carried: Carried) -> None:
    """Put the content into fresh pages, which the table holds again.

    Raises:
        PoolFullError: there is no room; nothing was changed.
    """
    ids = table.pool.allocate(carried.n_pages)
    write_pages(table.pool, ids, carried.arrays)
    table.take_back(ids, carried.owned)


def read_pages(pool: CountedPages[Any], ids: PageIds) -> tuple[Tensor, ...]:
    """The content of the pages, (n, slots, ...) per array of the pool; the pool has at least one arena."""
    found = []
    for arenas in pool.arrays.arrays:
        out = torch.empty(len(ids), *arenas[0].shape[1:], dtype=arenas[0].dtype)
        for arena, places, rows in _by_arena(pool, ids):
            out[places] = arenas[arena][rows.to(pool.arrays.device)].to("cpu")
        found.append(out)
    return tuple(found)


def write_pages(pool: CountedPages[Any], ids: PageIds, content: tuple[Tensor, ...]) -> None:
    """Give the pages the content that `read_pages` returned of others."""
    for arenas, rows_of in zip(pool.arrays.arrays, content, strict=True):
        for arena, places, rows in _by_arena(pool, ids):
            arenas[arena][rows.to(pool.arrays.device)] = rows_of[places].to(pool.arrays.device)


def _by_arena(pool: CountedPages[Any], ids: PageIds) -> list[tuple[int, Tensor, Tensor]]:
    """For each arena that holds some of the pages: its number, which of `ids` (n,), and their rows in it."""
    per_arena = pool.arrays.pages_per_arena
    arenas = ids // per_arena
    return [
        (int(a), torch.from_numpy(np.flatnonzero(arenas == a)), torch.from_numpy(ids[arenas == a] % per_arena).long())
        for a in np.unique(arenas)
    ]
