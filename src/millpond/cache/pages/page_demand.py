"""Pages that a write takes, for new entries and for copies of shared pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millpond.cache.pages.page_lists import Mask, PageLists

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
