"""Fetch of a table's pages into their pool for one pass of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.cache.pages.page_lists import PageLists
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.swap import Holder, read_pages, write_pages
from millpond.cache.tiered.extents import Numbers
from millpond.cache.tiered.offloaded_pages import OffloadedPages
from millpond.errors import DataError
from millpond.kernels.args import RunsInBuffer, WantedPages
from millpond.kernels.page_rows import PagePart, RowArrays, move_rows, unpack_runs
from millpond.tiers.loader import Errand


@dataclass(frozen=True, slots=True)
class WantedRuns:
    """Runs of which pages come into a pool.

    Attributes:
        runs: (n,) their numbers, in the order of their places. places: (m,) in `PageFetch.ids`, those of a run
            together. first: (n + 1,) where those of each run begin in `places`, and the last ends.
        wanted: (m,) which of their pages, and those of the pool. pages: of the pool.
    """

    runs: Numbers
    places: Numbers
    first: Numbers
    wanted: WantedPages
    pages: RowArrays

    def take(self, part: slice, data: Tensor, runs: RunsInBuffer) -> int:
        """Check some of the runs and put their pages into the pool, see `extents.Take`."""
        first = self.first[part.start : part.stop + 1]
        return unpack_runs(data, runs, self.pages, self.wanted, first)

    def places_of(self, number: int) -> list[int]:
        """Places of the pages of the run that is the `number`-th here."""
        found: list[int] = self.places[self.first[number] : self.first[number + 1]].tolist()
        return found


@dataclass(slots=True)
class PageFetch:
    """Pages of one part of a table on their way into the pool, or there.

    Attributes:
        offloaded: pool that they are of while they are elsewhere. held: these pages, once per holder in the table.
        ids, counts: each of them once, and how often it is held. inverse: (held,) which of `ids`.
        pages: (ids,) where their content is put. lives: of `pages`, see `RefCountedPool.lives`.
        moved: (ids,) the page is the one that held the content all the time. full: (ids,) there was no free slot.
        reads: what is read; None: nothing. errands: reads under way, with the runs of each, a slice of `reads`.
        failed: place in `ids` -> why it has no content.
    """

    offloaded: OffloadedPages
    held: PageIds
    ids: PageIds
    inverse: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    pages: PageIds
    lives: npt.NDArray[np.int64]
    moved: npt.NDArray[np.bool_]
    full: npt.NDArray[np.bool_]
    reads: WantedRuns | None = None
    errands: list[tuple[Errand, slice]] = field(default_factory=list)
    failed: dict[int, DataError] = field(default_factory=dict)

    # ------------------------------------------------------------------ in

    @classmethod
    def begin(cls, part: Holder) -> PageFetch:
        """Take pages of the pool, and begin to read.

        Raises:
            PoolFullError: there is no room; nothing was changed.
        """
        offloaded, pool = _offloaded_pool(part), part.pool
        lists = part.page_lists
        ids, inverse, counts = once(lists)
        stays = offloaded.resident[ids] >= 0
        moved = stays & (offloaded.refs(ids) == counts)
        pages = np.zeros(len(ids), dtype=np.int32)
        pages[~moved] = pool.allocate(int((~moved).sum()))
        copied = stays & ~moved
        if copied.any():  # others hold it too
            write_pages(pool, pages[copied], read_pages(pool, offloaded.resident[ids[copied]]))
        pages[moved] = offloaded.take_resident(ids[moved])
        free = (part.region_lengths[:, None] < (lists.columns + 1) * pool.slots)[lists.owned_mask()]
        full = np.bincount(inverse, free, len(ids)) == 0
        fetch = cls(offloaded, ids[inverse], ids, inverse, counts, pages, pool.lives(pages), moved, full)
        fetch._read(pool, ~stays)
        return fetch

    def end(self, part: Holder) -> None:
        """Wait until all is there, and let the part hold it."""
        pool, offloaded = part.pool, self.offloaded
        self._wait()
        if self.failed:
            self._fill_failed(pool)
        if offloaded.patches.nbytes:
            found, slots, which = offloaded.patches.of(self._places())
            rows = self.pages[found].astype(np.int64) * pool.slots + slots
            source, target = RowArrays.of_tensors(offloaded.patches.rows), RowArrays.of_slots(pool.arrays)
            move_rows(source, which, target, rows, len(rows))
        sides = PagePart.SIDES
        source, target = RowArrays.of_pages(offloaded.arrays, sides), RowArrays.of_pages(pool.arrays, sides)
        move_rows(source, self.ids, target, self.pages, len(self.ids))
        if len(self.held) > len(self.ids):
            pool.retain(np.repeat(self.pages, self.counts - 1))
        part.exchange(lists_with(part, pool, self.pages[self.inverse]))

    def cancel(self, pool: RefCountedPool[Any]) -> None:
        """Give the pages back that no table holds yet."""
        self._wait()
        pool.release(self.pages[~self.moved])
        self.offloaded.set_resident(self.ids[self.moved], self.pages[self.moved])

    def failed_sequences(self, part: Holder) -> dict[int, DataError]:
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
        """(n,) places in `ids` of some pages (n,); -1: other ones, or such that were free meanwhile."""
        places = np.full(pool.end, -1, dtype=np.int32)
        in_pool = np.flatnonzero(self.pages < pool.end)  # arenas at the end may be gone
        places[self.pages[in_pool]] = in_pool
        place: Numbers = places[pages].astype(np.int64)
        known = np.flatnonzero(place >= 0)
        other = self.lives[place[known]] != pool.lives(pages[known])
        place[known[other]] = -1
        return place

    # ------------------------------------------------------------------ internal

    def _places(self) -> npt.NDArray[np.int64]:
        places = np.full(self.offloaded.n_pages, -1)
        places[self.ids] = np.arange(len(self.ids))
        return places

    def _read(self, pool: RefCountedPool[Any], wanted: npt.NDArray[np.bool_]) -> None:
        extents, (numbers, rows) = self.offloaded.extents, self.offloaded.runs_of(self.ids)
        for place in np.flatnonzero(wanted & (numbers < 0)).tolist():
            self.failed[place] = DataError("keys and values of this text could not be written to the disk before")
        chosen = np.flatnonzero(wanted & (numbers >= 0))
        if lost := extents.lost(numbers[chosen]):
            without = np.isin(numbers[chosen], [*lost])
            for place in chosen[without].tolist():
                self.failed[place] = lost[int(numbers[place])]
            chosen = chosen[~without]
        if not len(chosen):
            return
        chosen = chosen[np.argsort(extents.runs.offset[numbers[chosen]], kind="stable")]
        of_each = numbers[chosen]
        first = np.concatenate([[0], np.flatnonzero(np.diff(of_each)) + 1, [len(chosen)]])
        to = WantedPages(rows[chosen], self.pages[chosen].astype(np.int64))
        pages = RowArrays.of_pages(pool.arrays, PagePart.CONTENTS)
        self.reads = WantedRuns(of_each[first[:-1]], chosen, first, to, pages)
        self.errands = extents.read(self.reads.runs, self.reads.take)

    def _wait(self) -> None:
        """Of what was read together and failed, each run is read once more alone: it may be whole, or be so now."""
        errands, self.errands = self.errands, []
        for errand, part in errands:
            if errand.finish() is not None:
                for number in range(part.start, part.stop):
                    self._read_alone(number)

    def _read_alone(self, number: int) -> None:
        reads = self.reads
        assert reads is not None, "it was read with others"

        def take(part: slice, data: Tensor, runs: RunsInBuffer) -> int:
            return reads.take(slice(number, number + 1), data, runs)

        ((errand, _),) = self.offloaded.extents.read(reads.runs[number : number + 1], take)
        if (error := errand.finish()) is not None:
            self.failed |= dict.fromkeys(reads.places_of(number), error)

    def _fill_failed(self, pool: RefCountedPool[Any]) -> None:
        pages = self.pages[sorted(self.failed)]
        empty = tuple(content.zero_() for content in read_pages(pool, pages, PagePart.CONTENTS))
        write_pages(pool, pages, empty, PagePart.CONTENTS)


def once(lists: PageLists) -> tuple[PageIds, Numbers, Numbers]:
    """The pages of lists once each, which of them each list holds, in the order of `PageLists.held`, and how often."""
    held = lists.held()
    if not lists.may_share:
        return held, np.arange(len(held)), np.ones(len(held), dtype=np.int64)
    ids, inverse, counts = np.unique(held, return_inverse=True, return_counts=True)
    return ids, inverse.reshape(-1), counts


def _offloaded_pool(part: Holder) -> OffloadedPages:
    offloaded = part.page_lists.pool
    assert isinstance(offloaded, OffloadedPages), "what is fetched was offloaded"
    return offloaded


def lists_with(part: Holder, pool: RefCountedPool[Any], held: PageIds) -> PageLists:
    """The page lists of a part with other pages, in the order of `held`."""
    before = part.page_lists
    lists = PageLists(pool, len(before.owned))
    lists.ids, lists.may_share = np.zeros_like(before.ids), before.may_share
    lists.owned = before.owned.copy()
    lists.ids[lists.owned_mask()] = held
    return lists
