"""Patches of pages on a disk: newer entries of some slots, in memory until the pages are written again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.cache.pages.ref_counted_pool import PageIds
from millpond.kernels.page_rows import RowArrays, move_rows, take


class Patches:
    """Entries of slots whose pages on a disk hold older ones.

    Attributes:
        nbytes: of all entries. rows: (n, dim) of each array.
    """

    def __init__(self) -> None:
        self._pages: PageIds = np.zeros(0, dtype=np.int32)
        self._slots: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.rows: list[Tensor] = []
        self.nbytes = 0

    def counts(self, n_pages: int) -> npt.NDArray[np.int64]:
        """(n_pages,) entries of each page."""
        return np.bincount(self._pages, minlength=n_pages)

    def put(self, pages: PageIds, slots: npt.NDArray[np.int64], rows: Sequence[Tensor]) -> None:
        """Keep entries, (n, dim) of each array, in place of what lay in these slots."""
        if not len(pages):
            return
        width = int(max(slots.max(), self._slots.max(initial=0))) + 1
        replaced = np.zeros((int(max(pages.max(), self._pages.max(initial=0))) + 1) * width, dtype=bool)
        replaced[pages.astype(np.int64) * width + slots] = True
        stay = np.flatnonzero(~replaced[self._pages.astype(np.int64) * width + self._slots])
        n, m = len(stay), len(pages)
        before = RowArrays.of_tensors(self.rows or [row[:0] for row in rows])
        self.rows = [row.new_empty(n + m, *row.shape[1:]) for row in rows]
        kept = RowArrays.of_tensors(self.rows)  # by move_rows, for torch would wake its threads for it
        move_rows(before, stay, kept, None, n)
        move_rows(RowArrays.of_tensors(rows), None, kept, np.arange(n, n + m), m)
        self._pages = np.concatenate([self._pages[stay], pages]).astype(np.int32)
        self._slots = np.concatenate([self._slots[stay], slots])
        self._count()

    def drop(self, gone: npt.NDArray[np.bool_]) -> None:
        """Forget the entries of pages that are `gone` (n_pages,)."""
        if len(self._pages):
            self._keep(~gone[self._pages])
            self._count()

    def of(
        self, place: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The entries of some pages.

        Args:
            place: (n_pages,) what stands for a page; -1: it is not wanted.

        Returns:
            What stands for their pages (n,), their slots (n,) and which of `rows` (n,) they are.
        """
        found = place[self._pages]
        chosen = np.flatnonzero(found >= 0)
        return found[chosen], self._slots[chosen], chosen

    def _keep(self, stay: npt.NDArray[np.bool_]) -> None:
        if not stay.all():
            which = np.flatnonzero(stay)
            self._pages, self._slots = self._pages[which], self._slots[which]
            self.rows = take(RowArrays.of_tensors(self.rows), which)

    def _count(self) -> None:
        self.nbytes = self._pages.nbytes + self._slots.nbytes + sum(rows.nbytes for rows in self.rows)
