"""Visit of a table's pages in their pool: they come for one pass of a layer, and leave after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.cache.pages.page_lists import PageLists
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.swap.pages import Holder, read_pages, write_pages
from millpond.cache.swap.rows import put_rows, take_rows
from millpond.cache.tiered.away_pages import AwayPages
from millpond.cache.tiered.extents import PageRun
from millpond.cache.tiered.pages_into import PagesInto
from millpond.errors import DataError
from millpond.tiers.loader import Errand


@dataclass(slots=True)
class PageVisit:
    """Pages of one part of a table on their way into the pool, or there.

    Attributes:
        away: pool that they are of while they are elsewhere. held: these pages, once per holder in the table.
        ids, counts: each of them once, and how often it is held. inverse: (held,) which of `ids`.
        pages: (ids,) where their content is put. lives: of `pages`, see `RefCountedPool.lives`.
        moved: (ids,) the page is the one that held the content all the time. full: (ids,) there was no free slot.
        errands: reads under way, with the runs of each. take: what they give their runs to.
        failed: place in `ids` -> why it has no content.
    """

    away: AwayPages
    held: PageIds
    ids: PageIds
    inverse: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    pages: PageIds
    lives: npt.NDArray[np.int64]
    moved: npt.NDArray[np.bool_]
    full: npt.NDArray[np.bool_]
    errands: list[tuple[Errand, list[PageRun]]] = field(default_factory=list)
    failed: dict[int, DataError] = field(default_factory=dict)
    take: Callable[[PageRun, Tensor], None] = lambda run, data: None

    # ------------------------------------------------------------------ in

    @classmethod
    def begin(cls, part: Holder) -> PageVisit:
        """Take pages of the pool, and begin to read.

        Raises:
            PoolFullError: there is no room; nothing was changed.
        """
        away, pool = _away(part), part.pool
        held = part.page_lists.held()
        ids, inverse, counts = np.unique(held, return_inverse=True, return_counts=True)
        stays = away.resident[ids] >= 0
        moved = stays & (away.refs(ids) == counts)
        pages = np.zeros(len(ids), dtype=np.int32)
        pages[~moved] = pool.allocate(int((~moved).sum()))
        copied = stays & ~moved
        if copied.any():  # others hold it too
            write_pages(pool, pages[copied], read_pages(pool, away.resident[ids[copied]]))
        pages[moved] = away.hand_over(ids[moved])
        lists = part.page_lists
        free = (part.region_lengths[:, None] < (lists.columns + 1) * pool.slots)[lists.owned_mask()]
        full = np.bincount(inverse.reshape(-1), free, len(ids)) == 0
        visit = cls(away, held, ids, inverse.reshape(-1), counts, pages, pool.lives(pages), moved, full)
        visit._read(pool, ~stays)
        return visit

    def end(self, part: Holder) -> None:
        """Wait until all is there, and let the part hold it."""
        pool, away = part.pool, self.away
        self._wait()
        if self.failed:
            self._fill_failed(pool)
        if away.patches.nbytes:
            found, slots, rows = away.patches.of(self._places())
            if len(found):
                _put(pool, self.pages[found], slots, rows)
        write_pages(pool, self.pages, read_pages(away, self.ids), sides_of(pool))
        if len(self.held) > len(self.ids):
            pool.retain(np.repeat(self.pages, self.counts - 1))
        part.exchange(lists_with(part, pool, self.pages[self.inverse]))

    def cancel(self, pool: RefCountedPool[Any]) -> None:
        """Give the pages back that no table holds yet."""
        self._wait()
        pool.release(self.pages[~self.moved])
        self.away.stay_in(self.ids[self.moved], self.pages[self.moved])

    def lost_sequences(self, part: Holder) -> dict[int, DataError]:
        """The sequences that hold what could not be read."""
        if not self.failed:
            return {}
        regions = np.nonzero(part.page_lists.owned_mask())[0]
        return {
            int(region) // part.n_kv_heads: self.failed[place]
            for region, place in zip(regions.tolist(), self.inverse.tolist(), strict=True)
            if place in self.failed
        }

    # ------------------------------------------------------------------ after it was there

    def find(self, pool: RefCountedPool[Any], pages: PageIds) -> npt.NDArray[np.int64]:
        """(n,) places in `ids` of some pages (n,), ascending; -1: other ones, or such that were free meanwhile."""
        order = np.argsort(self.pages)
        place = np.searchsorted(self.pages[order], pages)
        place = order[np.minimum(place, len(order) - 1)] if len(order) else np.zeros(len(pages), dtype=np.int64)
        same = np.zeros(len(pages), dtype=bool)
        if len(order):
            same = (self.pages[place] == pages) & (self.lives[place] == pool.lives(pages))
        found: npt.NDArray[np.int64] = np.where(same, place, -1)
        return found

    # ------------------------------------------------------------------ internal

    def _places(self) -> npt.NDArray[np.int64]:
        places = np.full(self.away.n_pages, -1)
        places[self.ids] = np.arange(len(self.ids))
        return places

    def _read(self, pool: RefCountedPool[Any], wanted: npt.NDArray[np.bool_]) -> None:
        numbers, rows = self.away.runs_of(self.ids)
        for place in np.flatnonzero(wanted & (numbers < 0)).tolist():
            self.failed[place] = DataError("keys and values of this text could not be written to the disk before")
        chosen = np.flatnonzero(wanted & (numbers >= 0))
        chosen = chosen[np.argsort(numbers[chosen], kind="stable")]
        each = np.split(chosen, np.flatnonzero(np.diff(numbers[chosen])) + 1) if len(chosen) else []
        targets: dict[int, tuple[npt.NDArray[np.int64], PageIds]] = {}
        runs: list[PageRun] = []
        for places in each:
            run = self.away.run(int(numbers[places[0]]))
            error = run.lost()
            if error is not None:
                self.failed |= dict.fromkeys(places.tolist(), error)
                continue
            runs.append(run)
            targets[id(run)] = rows[places], self.pages[places]

        if not runs:
            return
        pages_into = PagesInto(pool)

        def take(run: PageRun, data: Tensor) -> None:
            which, pages = targets[id(run)]
            pages_into.put(pages, data, run.n_pages, which)

        self.take = take
        self.errands = self.away.extents.read(runs, take)

    def _wait(self) -> None:
        """Of what was read together and failed, each run is read once more alone: it may be whole, or be so now."""
        for errand, runs in self.errands:
            if errand.finish() is None:
                continue
            for run in runs:
                ((alone, _),) = self.away.extents.read([run], self.take)
                if (error := alone.finish()) is not None:
                    self._fail(run, error)
        self.errands = []

    def _fail(self, run: PageRun, error: DataError) -> None:
        numbers, _ = self.away.runs_of(self.ids)
        for place, number in enumerate(numbers.tolist()):
            if number >= 0 and self.away.run(number) is run:
                self.failed[place] = error

    def _fill_failed(self, pool: RefCountedPool[Any]) -> None:
        pages = self.pages[sorted(self.failed)]
        empty = tuple(content.zero_() for content in read_pages(pool, pages, pool.arrays.contents))
        write_pages(pool, pages, empty, pool.arrays.contents)


def packed(pool: RefCountedPool[Any], pages: PageIds, room: Tensor) -> None:
    """Put the content of pages into room (n,) uint8, array after array."""
    begin = 0
    for content in read_pages(pool, pages, pool.arrays.contents):
        room[begin : begin + content.nbytes] = content.reshape(-1).view(room.dtype)
        begin += content.nbytes


def slot_rows(pool: RefCountedPool[Any], pages: PageIds, slots: npt.NDArray[np.int64]) -> list[Tensor]:
    """The entries in some slots of pages, (n, dim) of each array of contents."""
    found = []
    for arenas in pool.arrays.contents:
        flat = [arena.flatten(0, 1) for arena in arenas]
        out = flat[0].new_empty(len(pages), flat[0].shape[1])
        for arena, places, at in _slots_by_arena(pool, pages, slots):
            put_rows(out, places, take_rows(flat[arena], at))
        found.append(out)
    return found


def _put(pool: RefCountedPool[Any], pages: PageIds, slots: npt.NDArray[np.int64], rows: list[Tensor]) -> None:
    """Put entries into slots of pages."""
    for arenas, content in zip(pool.arrays.contents, rows, strict=True):
        for arena, places, at in _slots_by_arena(pool, pages, slots):
            put_rows(arenas[arena].flatten(0, 1), at, content, places)


def _slots_by_arena(pool: RefCountedPool[Any], pages: PageIds, slots: npt.NDArray[np.int64]) -> Any:
    """For each arena its number, which of the slots lie in it, and their rows in all of its slots."""
    per_arena = pool.arrays.pages_per_arena
    arenas = pages // per_arena
    for arena in np.unique(arenas).tolist():
        places = np.flatnonzero(arenas == arena)
        yield arena, places, (pages[places] % per_arena).astype(np.int64) * pool.slots + slots[places]


def sides_of(pool: RefCountedPool[Any]) -> list[list[Tensor]]:
    """Positions, scores and masses of a pool's pages, in arenas."""
    arrays = pool.arrays
    return [arrays.positions, arrays.scores, *([arrays.log_masses] if arrays.masses else [])]


def _away(part: Holder) -> AwayPages:
    away = part.page_lists.pool
    assert isinstance(away, AwayPages), "what comes was away"
    return away


def lists_with(part: Holder, pool: RefCountedPool[Any], held: PageIds) -> PageLists:
    """The page lists of a part with other pages, in the order of `held`."""
    before = part.page_lists
    lists = PageLists(pool, len(before.owned))
    lists.ids, lists.may_share = np.zeros_like(before.ids), before.may_share
    lists.owned = before.owned.copy()
    lists.ids[lists.owned_mask()] = held
    return lists
