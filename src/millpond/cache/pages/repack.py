"""Moves of live pages of a pool, so that the memory of free ones between them can be given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool

Mask = npt.NDArray[np.bool_]


def spare_pages(pool: RefCountedPool[Any], keep: int) -> int:
    """Return how many pages `give_back` can free if `keep` free ones stay.

    Live pages that can move do not count against it.
    """
    return 0 if pool.pinned else max(0, pool.n_free - keep)


def give_back(pool: RefCountedPool[Any], n: int) -> int:
    """Return the memory of up to `n` free pages; live pages move out of its way.

    Their holders follow. A page that an unknown holder has too does not move, nor does its arena.

    Returns:
        How many pages were freed: fewer than `n` if such pages are in the way.
    """
    return _Repacking(pool).give_back(n)


class _Repacking:
    """One change of the ids of a pool's pages.

    Attributes:
        new_ids: (n,) current id of each page.
        fixed: (n,) whether it cannot move.
    """

    def __init__(self, pool: RefCountedPool[Any]) -> None:
        self.pool, self.step = pool, pool.arrays.pages_per_arena
        self.new_ids: PageIds = np.arange(pool.end, dtype=np.int32)
        n_known_holders = np.zeros(pool.end, dtype=np.int64)
        for holder in pool.holders:
            for ids in holder.held_in(pool):
                np.add.at(n_known_holders, ids, 1)
        refs = pool.refs(self.new_ids)
        self.fixed: Mask = (refs > 0) & (n_known_holders != refs)

    def give_back(self, n: int) -> int:
        n_missing = min(n, self.pool.n_free)
        freed = 0
        while n_missing > freed:
            n_pages = self._shorten_one(n_missing - freed)
            if not n_pages:
                break
            freed += n_pages
        if (self.new_ids != np.arange(len(self.new_ids))).any():
            for holder in list(self.pool.holders):
                holder.follow(self.pool, self.new_ids)
        return freed

    def _shorten_one(self, n: int) -> int:
        """Free at most `n` pages of one arena, all of it if that is not more; return how many."""
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
        """Return the arena with the fewest live pages that may become shorter, or None.

        An arena that is shorter already comes before others that would become shorter too, and the first arena last.
        """
        sizes, live = (holders >= 0).sum(1), (holders > 0).sum(1)
        fixed = self.fixed[: self.pool.end].reshape(holders.shape).any(1)
        is_candidate = (sizes > 0) & ~fixed
        is_candidate[0] &= int(np.count_nonzero(sizes)) == 1
        candidates = np.flatnonzero(is_candidate)
        if not len(candidates):
            return None
        order = np.lexsort((live[candidates], sizes[candidates] == self.step, sizes[candidates] > n))
        return int(candidates[order[0]])

    def _move(self, pages: PageIds, arena: int, end: int) -> None:
        """Move pages of an arena to free ones in other arenas, or in it before `end`."""
        if not len(pages):
            return
        refs = self.pool.refs(np.arange(self.pool.end, dtype=np.int32))
        free = refs == 0
        free[end : (arena + 1) * self.step] = False
        target = np.flatnonzero(free)[: len(pages)].astype(np.int32)
        self.pool.move(pages, target)
        moves = np.arange(len(self.new_ids), dtype=np.int32)
        moves[pages] = target
        self.new_ids = moves[self.new_ids]
