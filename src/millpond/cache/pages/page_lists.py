"""Lists of the pages of a table's regions: shared pages, and the pages that a write takes."""

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
    """Pages of `n` regions, a row of ids for each, in the order of its slots.

    Args:
        pool: Pool of the pages.
        n: Number of regions.

    Attributes:
        pool: Pool of the pages.
        ids: Page ids, (R, n) int32, written in place; another array only if it became wider or has other rows. Columns
            after the pages that a region owns have no meaning.
        owned: Pages of each region, (R,).
        may_share: Whether some page may have another holder.
        appends_alone: Whether the pages that the next entries go to are known to have no other holder, so that a step
            that only appends copies none.
    """

    def __init__(self, pool: RefCountedPool[Any], n: int) -> None:
        self.pool = pool
        self.ids: PageIds = np.zeros((n, 1), dtype=np.int32)
        self.owned: Counts = np.zeros(n, dtype=np.int64)
        self.may_share = False
        self.appends_alone = False

    @classmethod
    def of_held(cls, pool: RefCountedPool[Any], ids: PageIds) -> PageLists:
        """Return lists of pages (R, n) that others hold too."""
        rows = cls(pool, len(ids))
        pool.retain(ids.ravel())
        rows.ids = ids.copy()
        rows.share()
        rows.owned[:] = ids.shape[1]
        return rows

    @property
    def columns(self) -> npt.NDArray[np.int64]:
        """The numbers of the columns of `ids`, (n,)."""
        return np.arange(self.ids.shape[1])

    def owned_mask(self, rows: Rows = slice(None)) -> Mask:
        """Return which of the `ids` of some regions are pages that they own."""
        return self.columns < self.owned[rows][:, None]

    def held(self, rows: Rows = slice(None)) -> PageIds:
        """Return the page ids of some regions, by region; a shared page once per holder."""
        return self.ids[rows][self.owned_mask(rows)]

    def follow(self, new_ids: PageIds) -> None:
        """Replace each page i that is held by page new_ids[i] of the pool."""
        owned = self.owned_mask()
        self.ids[owned] = new_ids[self.ids[owned]]

    def n_shared(self, written: Mask | None = None) -> int:
        """Return how many of the pages to be `written` (R, n), or of all, others hold too."""
        if not self.may_share:
            return 0
        owned = self.owned_mask() if written is None else self.owned_mask() & written
        return int((self.pool.refs(self.ids[owned]) > 1).sum())

    # ------------------------------------------------------------------ room

    def grow(self, rows: npt.NDArray[np.int64], more: Counts) -> None:
        """Allocate more (n,) pages for each of some regions, after those that they own.

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
        self.appends_alone = False
        n_kept = np.minimum(self.owned[rows], keep)
        self.pool.release(self.ids[rows][self.owned_mask(rows) & (self.columns >= n_kept[:, None])])
        self.owned[rows] = n_kept

    def drop(self, rows: Rows, chosen: Mask) -> None:
        """Free the `chosen` (n, <= columns) pages of some regions; later pages move up."""
        self.appends_alone = False
        owned, dropped = self.owned_mask(rows), np.zeros((len(chosen), self.ids.shape[1]), dtype=bool)
        dropped[:, : chosen.shape[1]] = chosen
        dropped &= owned
        self.pool.release(self.ids[rows][dropped])
        keep = owned & ~dropped
        self.ids[rows] = np.take_along_axis(self.ids[rows], np.argsort(~keep, axis=1, kind="stable"), 1)
        self.owned[rows] = keep.sum(1)

    def clear(self) -> None:
        """Release every page."""
        self.cut(slice(None), 0)

    # ------------------------------------------------------------------ sharing

    def select(self, rows: npt.NDArray[np.int64]) -> None:
        """Keep the given rows, in this order; the pages of one named many times are shared."""
        previous_pages = self.held()
        self.ids, self.owned = self.ids[rows].copy(), self.owned[rows].copy()
        self.pool.retain(self.held())
        self.pool.release(previous_pages)
        self.share()

    def fork(self) -> PageLists:
        """Return lists of the same pages, held by both."""
        other = PageLists(self.pool, len(self.owned))
        other.ids, other.owned = self.ids.copy(), self.owned.copy()
        self.pool.retain(self.held())
        self.share()
        other.share()
        return other

    def share(self) -> None:
        """Note that another holder may share some of these pages from now on."""
        self.may_share, self.appends_alone = True, False

    def join(self, other: PageLists) -> None:
        """Take the rows of other lists of this pool, after these, and empty them."""
        assert other.pool is self.pool, "pages stay in their pool"
        width = max(self.ids.shape[1], other.ids.shape[1])
        self.ids = np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in (self.ids, other.ids)])
        self.owned = np.concatenate([self.owned, other.owned])
        self.may_share |= other.may_share
        self.appends_alone &= other.appends_alone
        other.owned[:] = 0

    def copy_on_write(self, written: Mask | None = None) -> bool:
        """Copy the pages to be `written` (R, n), or all for None, that others hold too.

        Returns:
            Whether ids have changed.

        Raises:
            PoolFullError: no room for the copies; nothing was changed.
        """
        if not self.n_shared():
            self.may_share, self.appends_alone = False, True
            return False
        copies = self.n_shared(written) > 0
        if copies:
            owned = self.owned_mask() if written is None else self.owned_mask() & written
            self.ids[owned] = self.pool.privatise(self.ids[owned])
        self.may_share = written is not None
        later = None if written is None else np.logical_or.accumulate(written, axis=1)
        self.appends_alone = self.n_shared(later) == 0
        return copies

    def release_all(self) -> Counts:
        """Release every page, for `restore`; return the pages per region."""
        owned = self.owned.copy()
        self.clear()
        return owned

    def restore(self, ids: PageIds, owned: Counts) -> None:
        """Hold pages after `release_all`: `ids` in the order of `held`, `owned` of each region."""
        self.owned, self.may_share, self.appends_alone = owned.copy(), len(np.unique(ids)) < len(ids), False
        self.ids[self.owned_mask()] = ids

    # ------------------------------------------------------------------ internal

    def _widen(self, columns: int) -> None:
        if columns > self.ids.shape[1]:
            grown = np.zeros((len(self.owned), max(columns, self.ids.shape[1] * 5 // 4)), dtype=np.int32)
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown


Ints = npt.NDArray[np.int32]


def lacking(pages: PageLists, rows: slice, lens: Ints) -> npt.NDArray[np.int64]:
    """Return the pages that some regions lack for lens (n,) entries, (n,)."""
    more: npt.NDArray[np.int64] = np.maximum(-(-lens // pages.pool.slots) - pages.owned[rows], 0)
    return more


def written(pages: PageLists, lens: Ints, whole: bool) -> Mask | None:
    """Return which pages a step writes to, (R, n).

    None for all (`whole`); else the page after lens (R,) entries.
    """
    return None if whole else pages.columns == (lens // pages.pool.slots)[:, None]


def pages_for_step(pages: PageLists, lens: Ints, growing: Mask | None, whole: bool) -> int:
    """Return the most pages that one more entry per region takes, copies included.

    Args:
        pages: Pages of the regions.
        lens: Entries of each region, (R,).
        growing: Regions that grow, (R,); None for all.
        whole: Whether all entries are rewritten.
    """
    full = pages.owned * pages.pool.slots == lens
    fresh = int((full if growing is None else full & growing).sum())
    return fresh + pages.n_shared(written(pages, lens, whole))


def pages_for(pages: PageLists, lens: Ints, n_tokens: int, whole: bool) -> int:
    """Return the pages that `n_tokens` more entries of every region take, copies included.

    Args:
        pages: Pages of the regions.
        lens: Entries of each region, (R,).
        n_tokens: New entries per region.
        whole: Whether all entries are rewritten.
    """
    return int(lacking(pages, slice(None), lens + n_tokens).sum()) + pages.n_shared(written(pages, lens, whole))


def pages_to_renew(pages: PageLists, max_pages: int) -> int:
    """Return the pages that it takes to rewrite all entries, at most `max_pages` of them.

    Pages that nobody else holds are freed first.
    """
    shared = pages.n_shared()
    return min(shared, max(0, max_pages - (len(pages.held()) - shared)))
