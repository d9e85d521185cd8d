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
    """Runs on the disk whose pages are read into a pool.

    Attributes:
        runs: Numbers of the runs (n,), in the order of their offsets.
        places: Places in `PageFetch.ids` (m,), those of a run together.
        first: Where the places of each run begin in `places`, and where the last ends, (n + 1,).
        wanted: Pages of the runs that are read, and pages of the pool that receive them, (m,).
        pages: Arrays of the pool.
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
        """Return the places in `PageFetch.ids` of the pages of the `number`-th run."""
        places: list[int] = self.places[self.first[number] : self.first[number + 1]].tolist()
        return places


@dataclass(slots=True)
class PageFetch:
    """Pages of one part of a table that are read into the pool for a pass.

    Attributes:
        offloaded: Pool that the pages belong to between passes.
        held: These pages, once per holder in the table.
        ids: Each of these pages once.
        inverse: Index in `ids` of each page of `held`, (held,).
        counts: Holders of each page of `ids` in the table.
        pages: Pages of the pool that receive the content, (ids,).
        lives: Lives of `pages`, see `RefCountedPool.lives`.
        moved: Whether the page of the pool held the content already, (ids,).
        full: Whether no slot of the page was free, (ids,).
        reads: Runs that are read; None if there are none.
        errands: Reads under way, with the slice of `reads` that each reads.
        failed: Error of each place in `ids` whose content could not be read.
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
        """Allocate pages of the pool, and begin to read.

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
        """Wait until all pages are read, and let the part hold them."""
        pool, offloaded = part.pool, self.offloaded
        self._wait()
        if self.failed:
            self._fill_failed(pool)
        if offloaded.patches.nbytes:
            places, slots, which = offloaded.patches.of(self._places())
            rows = self.pages[places].astype(np.int64) * pool.slots + slots
            source, target = RowArrays.of_tensors(offloaded.patches.rows), RowArrays.of_slots(pool.arrays)
            move_rows(source, which, target, rows, len(rows))
        sides = PagePart.SIDES
        source, target = RowArrays.of_pages(offloaded.arrays, sides), RowArrays.of_pages(pool.arrays, sides)
        move_rows(source, self.ids, target, self.pages, len(self.ids))
        if len(self.held) > len(self.ids):
            pool.retain(np.repeat(self.pages, self.counts - 1))
        part.exchange(lists_with(part, pool, self.pages[self.inverse]))

    def cancel(self, pool: RefCountedPool[Any]) -> None:
        """Release the pages of the pool that no table holds yet."""
        self._wait()
        pool.release(self.pages[~self.moved])
        self.offloaded.set_resident(self.ids[self.moved], self.pages[self.moved])

    def failed_sequences(self, part: Holder) -> dict[int, DataError]:
        """Return the error of each sequence that holds a page that could not be read."""
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
        """Return the places in `ids` of some pages, (n,); -1 for pages that are new since."""
        places = np.full(pool.end, -1, dtype=np.int32)
        in_pool = np.flatnonzero(self.pages < pool.end)  # arenas at the end may be gone
        places[self.pages[in_pool]] = in_pool
        place: Numbers = places[pages].astype(np.int64)
        fetched = np.flatnonzero(place >= 0)
        reused = self.lives[place[fetched]] != pool.lives(pages[fetched])
        place[fetched[reused]] = -1
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
        readable = np.flatnonzero(wanted & (numbers >= 0))
        if lost := extents.lost(numbers[readable]):
            without = np.isin(numbers[readable], [*lost])
            for place in readable[without].tolist():
                self.failed[place] = lost[int(numbers[place])]
            readable = readable[~without]
        if not len(readable):
            return
        readable = readable[np.argsort(extents.runs.offset[numbers[readable]], kind="stable")]
        of_each = numbers[readable]
        first = np.concatenate([[0], np.flatnonzero(np.diff(of_each)) + 1, [len(readable)]])
        to = WantedPages(rows[readable], self.pages[readable].astype(np.int64))
        pages = RowArrays.of_pages(pool.arrays, PagePart.CONTENTS)
        self.reads = WantedRuns(of_each[first[:-1]], readable, first, to, pages)
        self.errands = extents.read(self.reads.runs, self.reads.take)

    def _wait(self) -> None:
        """Wait for all reads, and repeat each failed one run by run: some runs may be intact."""
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
    """Return each page of lists once, the index of each held page, and the holders.

    Indices are in the order of `PageLists.held`.
    """
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
    """Return the page lists of a part with other pages, in the order of `held`."""
    before = part.page_lists
    lists = PageLists(pool, len(before.owned))
    lists.ids, lists.may_share = np.zeros_like(before.ids), before.may_share
    lists.owned = before.owned.copy()
    lists.ids[lists.owned_mask()] = held
    return lists
