"""Pages whose keys and values are on a disk or in another page, with patches of newer entries in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages.pool import side_bytes
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.tiered.extents import LayerExtents
from millpond.kernels.page_rows import RowArrays, move_rows, take
from millpond.kernels.pages import Arenas


class Patches:
    """Entries in memory that replace older ones in slots of pages on a disk.

    Attributes:
        rows: Entries of each array, (n, dim).
        nbytes: Bytes of all entries.
    """

    def __init__(self) -> None:
        self._pages: PageIds = np.zeros(0, dtype=np.int32)
        self._slots: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.rows: list[Tensor] = []
        self.nbytes = 0

    def counts(self, n_pages: int) -> npt.NDArray[np.int64]:
        """Return the number of entries of each page, (n_pages,)."""
        return np.bincount(self._pages, minlength=n_pages)

    def put(self, pages: PageIds, slots: npt.NDArray[np.int64], rows: Sequence[Tensor]) -> None:
        """Keep entries, (n, dim) of each array, in place of the content of these slots."""
        if not len(pages):
            return
        width = int(max(slots.max(), self._slots.max(initial=0))) + 1
        replaced = np.zeros((int(max(pages.max(), self._pages.max(initial=0))) + 1) * width, dtype=bool)
        replaced[pages.astype(np.int64) * width + slots] = True
        stay = np.flatnonzero(~replaced[self._pages.astype(np.int64) * width + self._slots])
        n, m = len(stay), len(pages)
        before = RowArrays.of_tensors(self.rows or [row[:0] for row in rows])
        self.rows = [row.new_empty(n + m, *row.shape[1:]) for row in rows]
        target = RowArrays.of_tensors(self.rows)  # by move_rows, for torch would wake its threads for it
        move_rows(before, stay, target, None, n)
        move_rows(RowArrays.of_tensors(rows), None, target, np.arange(n, n + m), m)
        self._pages = np.concatenate([self._pages[stay], pages]).astype(np.int32)
        self._slots = np.concatenate([self._slots[stay], slots])
        self._count()

    def drop(self, dropped: npt.NDArray[np.bool_]) -> None:
        """Drop the entries of the pages that are `dropped`, (n_pages,) bool."""
        if len(self._pages):
            self._keep(~dropped[self._pages])
            self._count()

    def of(
        self, place: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the entries of some pages.

        Args:
            place: Number that stands for each page, (n_pages,); -1 for pages that are not requested.

        Returns:
            Numbers that stand for their pages (n,), their slots (n,) and their indices in `rows` (n,).
        """
        numbers = place[self._pages]
        which = np.flatnonzero(numbers >= 0)
        return numbers[which], self._slots[which], which

    def _keep(self, stay: npt.NDArray[np.bool_]) -> None:
        if not stay.all():
            which = np.flatnonzero(stay)
            self._pages, self._slots = self._pages[which], self._slots[which]
            self.rows = take(RowArrays.of_tensors(self.rows), which)

    def _count(self) -> None:
        self.nbytes = self._pages.nbytes + self._slots.nbytes + sum(rows.nbytes for rows in self.rows)


#: Position of a slot that holds nothing: no entry and no tombstone has it.
NOTHING = -2
#: Pages by which the arrays grow, beyond what is missing: an eighth of those that there are.
_SPARE = 8


@dataclass(slots=True)
class SideArrays(Arenas):
    """Positions, scores and masses of pages in one arena that grows."""

    slots: int
    masses: bool
    pages_per_arena: int = 1 << 30
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    positions: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    log_masses: list[Tensor] = field(default_factory=list)
    bases: Tensor = field(default_factory=lambda: torch.zeros(5, 0, dtype=torch.int64))

    @property
    def contents(self) -> list[list[Tensor]]:
        return []

    def extend(self, n_pages: int) -> None:
        """Add `n_pages` pages; none moves."""
        for arenas, dtype in zip(self.arrays, (torch.int32, torch.float32, torch.float32), strict=False):
            n = sum(map(len, arenas))
            grown = torch.empty(n + n_pages, self.slots, dtype=dtype)
            for before in arenas:
                grown.numpy()[:n] = before.numpy()  # torch would wake its threads for it
            arenas[:] = [grown]
        self.refresh()

    def clear(self) -> None:
        """Remove all pages."""
        for arenas in self.arrays:
            arenas.clear()
        self.refresh()

    def _add_contents(self, n_pages: int) -> None:
        raise AssertionError("keys and values are elsewhere")


class OffloadedPages(RefCountedPool[SideArrays]):
    """Pages of one layer that have left their pool; tables name them in place of those.

    Positions, scores and masses stay in memory and count against the limit of the pool.

    Args:
        pool: Pool that the pages have left.
        extents: Extents of the layer on the disk.

    Attributes:
        patches: Entries that are newer than those in the runs.
        resident: Page of `pool` that holds the content of each page, (n,); -1 for none.
    """

    def __init__(self, pool: RefCountedPool[Any], extents: LayerExtents) -> None:
        self.pool, self.extents = pool, extents
        self.patches = Patches()
        self.resident: PageIds = np.zeros(0, dtype=np.int32)
        self._run: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._row: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        masses = pool.arrays.masses
        arrays = SideArrays(pool.slots, masses)
        super().__init__(arrays, 0, side_page_bytes(pool), None, pool.memory_limit)

    @property
    def nbytes(self) -> int:
        return self.arrays.nbytes + self.patches.nbytes

    # ------------------------------------------------------------------ room

    def bytes_to_grow(self, n: int, *, exact: bool = False) -> int:
        return max(0, n - (self.n_pages - self.n_live)) * self.page_bytes

    def release(self, ids: PageIds) -> None:
        super().release(ids)
        freed = np.unique(ids[self._refs[ids] == 0])
        if len(freed):
            self._forget(freed)

    def grow(self, n: int) -> None:
        """Do nothing: the pool grows only by the pages that are requested, when they are."""

    def trim(self, keep: int = 0) -> int:
        before = self.nbytes
        if self.n_pages > keep and not self.n_live:
            self.arrays.clear()
            self._extend(-self.n_pages)
        return before - self.nbytes

    # ------------------------------------------------------------------ content

    @property
    def residents(self) -> PageIds:
        """Pages of the pool that hold the content of some of these pages."""
        return self.resident[self.resident >= 0]

    def runs_of(self, ids: PageIds) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the runs that hold some pages, -1 for none, and the index of each in its run."""
        return self._run[ids], self._row[ids]

    def set_run(self, ids: PageIds, run: int) -> None:
        """Record that these pages, in this order, are the content of a run of `extents`."""
        self._leave(ids)
        self._run[ids], self._row[ids] = run, np.arange(len(ids))

    def drop_content(self, ids: PageIds) -> None:
        """Record that the content of these pages is lost."""
        self._leave(ids)

    def set_resident(self, ids: PageIds, pages: PageIds) -> None:
        """Record that pages of the pool hold the content; the caller passes one holder of each."""
        self._leave(ids)
        self.resident[ids] = pages

    def take_resident(self, ids: PageIds) -> PageIds:
        """Return the pages of the pool that hold the content, and pass their holder to the caller."""
        pages = self.resident[ids].copy()
        self.resident[ids] = -1
        return pages

    # ------------------------------------------------------------------ internal

    def _grow(self, missing: int) -> int:
        more, free = missing + self.n_pages // _SPARE, self.n_pages - self.n_live
        if self.memory_limit is not None and not self.memory_limit.can_take({self: free + more}):
            more = missing
        self._extend(more)
        return more

    def _extend(self, n: int) -> None:
        """Add `n` free pages; remove -n if n is negative."""
        if n < 0:
            self._refs, self._lives = self._refs[:n], self._lives[:n]
            self.resident, self._run, self._row = self.resident[:n], self._run[:n], self._row[:n]
            return
        self.arrays.extend(n)
        self._add_ids(n)
        self.resident = np.concatenate([self.resident, np.full(n, -1, dtype=np.int32)])
        self._run = np.concatenate([self._run, np.full(n, -1)])
        self._row = np.concatenate([self._row, np.zeros(n, dtype=np.int64)])

    def _forget(self, ids: PageIds) -> None:
        self._leave(ids)
        held = self.resident[ids]
        self.pool.release(held[held >= 0])
        self.resident[ids] = -1

    def _leave(self, ids: PageIds) -> None:
        """Release the runs of these pages, and drop their patches."""
        numbers = self._run[ids]
        numbers = numbers[numbers >= 0]
        if len(numbers):
            live = self.extents.runs.live
            np.subtract.at(live, numbers, 1)
            for number in set(numbers[live[numbers] == 0].tolist()):
                self.extents.free(number)
        self._run[ids] = -1
        if self.patches.nbytes:
            dropped = np.zeros(self.n_pages, dtype=bool)
            dropped[ids] = True
            self.patches.drop(dropped)


def side_page_bytes(pool: RefCountedPool[Any]) -> int:
    """Return the bytes of the positions, scores and masses of a page."""
    return int(pool.slots * side_bytes(pool.arrays.masses))
