"""Moves of live pages of a pool, so that the memory of free ones between them can be given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool

Mask = npt.NDArray[np.bool_]


def spare_pages(pool: RefCountedPool[Any], keep: int) -> int:
    """Pages that `give_back` can give back if `keep` free ones stay, as far as live ones can move."""
    return 0 if pool.pinned else max(0, pool.n_free - keep)


def give_back(pool: RefCountedPool[Any], n: int) -> int:
    """Give the memory of `n` of the free pages back; live pages move out of its way, and their holders follow.

    A page that some unknown holder holds too does not move, nor does its arena.

    Returns:
        How many pages it was: fewer where such pages are in the way.
    """
    return _Repacking(pool).give_back(n)


class _Repacking:
    """One change of the places of a pool's pages.

    Attributes:
        places: (n,) where each page is now. fixed: (n,) whether it can move.
    """

    def __init__(self, pool: RefCountedPool[Any]) -> None:
        self.pool, self.step = pool, pool.arrays.pages_per_arena
        self.places: PageIds = np.arange(pool.end, dtype=np.int32)
        held = np.zeros(pool.end, dtype=np.int64)
        for holder in pool.holders:
            for ids in holder.held_in(pool):
                np.add.at(held, ids, 1)
        refs = pool.refs(self.places)
        self.fixed: Mask = (refs > 0) & (held != refs)

    def give_back(self, n: int) -> int:
        left = min(n, self.pool.n_free)
        given = 0
        while left > given:
            gone = self._shorten_one(left - given)
            if not gone:
                break
            given += gone
        if (self.places != np.arange(len(self.places))).any():
            for holder in list(self.pool.holders):
                holder.follow(self.pool, self.places)
        return given

    def _shorten_one(self, n: int) -> int:
        """Give at most `n` pages of one arena back, all of it if that is not more; returns how many."""
        holders = self.pool.by_arena()
        arena = self._choose(n, holders)
        if arena is None:
            return 0
        size, first = self.pool.size_of(arena), arena * self.step
        keep = max(0, size - n)
        leaving = first + keep + np.flatnonzero(holders[arena, keep:] > 0)
        self._move(leaving.astype(np.int32), arena, first + keep)
        self.pool.resize(arena, keep)
        return size - keep

    def _choose(self, n: int, holders: npt.NDArray[np.int32]) -> int | None:
        """The arena with the fewest live pages among those that may become shorter; None: there is none.

        The one that is shorter already comes before others that would become shorter too, and the first one last.
        """
        sizes, live = (holders >= 0).sum(1), (holders > 0).sum(1)
        fixed = self.fixed[: self.pool.end].reshape(holders.shape).any(1)
        may = (sizes > 0) & ~fixed
        may[0] &= int(np.count_nonzero(sizes)) == 1
        found = np.flatnonzero(may)
        if not len(found):
            return None
        order = np.lexsort((live[found], sizes[found] == self.step, sizes[found] > n))
        return int(found[order[0]])

    def _move(self, pages: PageIds, arena: int, end: int) -> None:
        """Move pages of an arena to free ones elsewhere, or in it before `end`."""
        if not len(pages):
            return
        refs = self.pool.refs(np.arange(self.pool.end, dtype=np.int32))
        free = refs == 0
        free[end : (arena + 1) * self.step] = False
        target = np.flatnonzero(free)[: len(pages)].astype(np.int32)
        self.pool.move(pages, target)
        step = np.arange(len(self.places), dtype=np.int32)
        step[pages] = target
        self.places = step[self.places]
