"""The pages that the regions of a table hold, whether others hold them too, and the pages that a write takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
#: Regions: neighbours, or any, each once.
Rows = slice | npt.NDArray[np.int64]


class PageLists:
    """The pages of `n` regions, a row of ids for each, in the order of its slots.

    Attributes:
        pool: whose pages they are.
        ids: (R, n) int32, written in place; another array only where it became wider or has other rows. What lies
            after the pages that a region owns says nothing.
        owned: (R,) pages of each region.
        may_share: some page may have another holder.
    """

    def __init__(self, pool: RefCountedPool[Any], n: int) -> None:
        self.pool = pool
        self.ids: PageIds = np.zeros((n, 1), dtype=np.int32)
        self.owned: Counts = np.zeros(n, dtype=np.int64)
        self.may_share = False

    @classmethod
    def of_held(cls, pool: RefCountedPool[Any], ids: PageIds) -> PageLists:
        """Rows of pages (R, n) that others hold too."""
        rows = cls(pool, len(ids))
        pool.retain(ids.ravel())
        rows.ids, rows.may_share = ids.copy(), True
        rows.owned[:] = ids.shape[1]
        return rows

    @property
    def columns(self) -> npt.NDArray[np.int64]:
        """(n,) the numbers of the columns of `ids`."""
        return np.arange(self.ids.shape[1])

    def owned_mask(self, rows: Rows = slice(None)) -> Mask:
        """Which of the `ids` of some regions are pages that they own."""
        return self.columns < self.owned[rows][:, None]

    def held(self, rows: Rows = slice(None)) -> PageIds:
        """Page ids of some regions, one region after the other; a shared page once per holder."""
        return self.ids[rows][self.owned_mask(rows)]

    def follow(self, places: PageIds) -> None:
        """Each page i that is held is page places[i] of the pool from now on."""
        owned = self.owned_mask()
        self.ids[owned] = places[self.ids[owned]]

    def n_shared(self, written: Mask | None = None) -> int:
        """Pages, of those that will be `written` (R, n), that others hold too; None: of all."""
        if not self.may_share:
            return 0
        owned = self.owned_mask() if written is None else self.owned_mask() & written
        return int((self.pool.refs(self.ids[owned]) > 1).sum())

    # ------------------------------------------------------------------ room

    def grow(self, rows: npt.NDArray[np.int64], more: Counts) -> None:
        """Fresh pages for some regions, more (n,) each, after those that they own.

        Raises:
            PoolFullError: the pool is full; nothing was changed.
        """
        fresh = self.pool.allocate(int(more.sum()))
        self._widen(int((self.owned[rows] + more).max(initial=0)))
        row = np.repeat(rows, more)
        first = np.repeat(self.owned[rows] - (more.cumsum() - more), more)
        self.ids[row, first + np.arange(len(fresh))] = fresh
        self.owned[rows] += more

    def cut(self, rows: Rows, keep: npt.NDArray[np.integer[Any]] | int) -> None:
        """Free the pages of some regions beyond the first keep (n,)."""
        kept = np.minimum(self.owned[rows], keep)
        self.pool.release(self.ids[rows][self.owned_mask(rows) & (self.columns >= kept[:, None])])
        self.owned[rows] = kept

    def drop(self, rows: Rows, chosen: Mask) -> None:
        """Free the `chosen` (n, <= columns) pages of some regions; later ones take their places."""
        owned, gone = self.owned_mask(rows), np.zeros((len(chosen), self.ids.shape[1]), dtype=bool)
        gone[:, : chosen.shape[1]] = chosen
        gone &= owned
        self.pool.release(self.ids[rows][gone])
        keep = owned & ~gone
        self.ids[rows] = np.take_along_axis(self.ids[rows], np.argsort(~keep, axis=1, kind="stable"), 1)
        self.owned[rows] = keep.sum(1)

    def clear(self) -> None:
        """Give every page back."""
        self.cut(slice(None), 0)

    # ------------------------------------------------------------------ sharing

    def select(self, rows: npt.NDArray[np.int64]) -> None:
        """Become the given rows, in this order; one may be named many times: its pages are shared."""
        before = self.held()
        self.ids, self.owned = self.ids[rows].copy(), self.owned[rows].copy()
        self.pool.retain(self.held())
        self.pool.release(before)
        self.may_share = True

    def fork(self) -> PageLists:
        """The same pages once more, held by both."""
        other = PageLists(self.pool, len(self.owned))
        other.ids, other.owned = self.ids.copy(), self.owned.copy()
        self.pool.retain(self.held())
        self.may_share = other.may_share = True
        return other

    def join(self, other: PageLists) -> None:
        """Take over the rows of another one of this pool, after these; it holds nothing afterwards."""
        assert other.pool is self.pool, "pages stay in their pool"
        width = max(self.ids.shape[1], other.ids.shape[1])
        self.ids = np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in (self.ids, other.ids)])
        self.owned = np.concatenate([self.owned, other.owned])
        self.may_share |= other.may_share
        other.owned[:] = 0

    def copy_on_write(self, written: Mask | None = None) -> bool:
        """Before a write: copy the pages that will be `written` (R, n) and that others hold too; None: of all.

        Returns:
            Whether ids have changed.

        Raises:
            PoolFullError: no room for the copies; nothing was changed.
        """
        if not self.n_shared():
            self.may_share = False
            return False
        owned = self.owned_mask() if written is None else self.owned_mask() & written
        self.ids[owned] = self.pool.privatise(self.ids[owned])
        self.may_share = written is not None
        return True

    def release_all(self) -> Counts:
        """Give every page back, until pages with the same content come; returns pages per region."""
        owned = self.owned.copy()
        self.clear()
        return owned

    def restore(self, ids: PageIds, owned: Counts) -> None:
        """Hold pages again: `ids` in the order of `held`, `owned` of each region, from `release_all`."""
        self.owned, self.may_share = owned.copy(), len(np.unique(ids)) < len(ids)
        self.ids[self.owned_mask()] = ids

    # ------------------------------------------------------------------ internal

    def _widen(self, columns: int) -> None:
        if columns > self.ids.shape[1]:
            grown = np.zeros((len(self.owned), max(columns, self.ids.shape[1] * 5 // 4)), dtype=np.int32)
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown


Ints = npt.NDArray[np.int32]


def lacking(pages: PageLists, rows: slice, lens: Ints) -> npt.NDArray[np.int64]:
    """(n,) pages that some regions lack for lens (n,) entries."""
    more: npt.NDArray[np.int64] = np.maximum(-(-lens // pages.pool.slots) - pages.owned[rows], 0)
    return more


def written(pages: PageLists, lens: Ints, whole: bool) -> Mask | None:
    """(R, n) which pages a step writes to: None for all (`whole`), or the one behind lens (R,) entries."""
    return None if whole else pages.columns == (lens // pages.pool.slots)[:, None]


def pages_for_step(pages: PageLists, lens: Ints, growing: Mask | None, whole: bool) -> int:
    """Most pages that one more entry takes of each of the regions `growing` (R,), None: of all; copies included."""
    full = pages.owned * pages.pool.slots == lens
    fresh = int((full if growing is None else full & growing).sum())
    return fresh + pages.n_shared(written(pages, lens, whole))


def pages_for(pages: PageLists, lens: Ints, n_tokens: int, whole: bool) -> int:
    """Pages that `n_tokens` more entries of every region take, copies included; whole: all entries are rewritten."""
    return int(lacking(pages, slice(None), lens + n_tokens).sum()) + pages.n_shared(written(pages, lens, whole))


def pages_to_renew(pages: PageLists, most: int) -> int:
    """Pages that it takes to rewrite all entries, at most `most` pages of them: those held alone go before."""
    shared = pages.n_shared()
    return min(shared, max(0, most - (len(pages.held()) - shared)))
