"""Swap of a sequence: the content of its pages moves out of the pool and back, bit for bit.

A cache that chose its entries by a question cannot be computed again from its text. So a preempted
sequence is moved to the host's memory or to files (see `SwapFiles`), outside the pool's limit, and continues later as
if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.kernels.page_rows import PagePart, RowArrays, move_rows, take

#: What holds pages: the plain part of a table, or a packed one.
Holder = PageTable | QuantizedStore
#: What pages hold, (n, ...) per array of their pool.
Content = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """The pages of one part of a table outside its pool.

    Attributes:
        pool: where they were. owned: (R,) pages per region. arrays: the content of all pages, each once, on the host.
        which: (held,) of these pages, in the order of the regions: several hold those that they share.
    """

    pool: RefCountedPool[Any]
    owned: npt.NDArray[Any]
    arrays: Content
    which: npt.NDArray[np.int64]

    @property
    def n_pages(self) -> int:
        return int(self.which.max(initial=-1)) + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return sum(array.nbytes for array in self.arrays)


def copy_out(table: PageTable) -> list[Content]:
    """The content of the table's pages, each once, on the host, for each of its parts."""
    return [read_pages(part.pool, np.unique(part.held())) for part in parts_of(table)]


def release_all(table: PageTable, content: list[Content]) -> list[SwappedPages]:
    """Give the table's pages back; afterwards it may only be swapped in, or cleared. `content`: from `copy_out`."""
    found = []
    for part, arrays in zip(parts_of(table), content, strict=True):
        which = np.unique(part.held(), return_inverse=True)[1].reshape(-1)
        found.append(SwappedPages(part.pool, part.release_all(), arrays, which))
    return found


def restore(table: PageTable, carried: list[SwappedPages]) -> None:
    """Put the content into fresh pages, which the table holds again.

    Raises:
        PoolFullError: there is no room; nothing was changed.
    """
    taken: list[PageIds] = []
    try:
        for one in carried:
            taken.append(one.pool.allocate(one.n_pages))
    except BaseException:
        for one, ids in zip(carried, taken, strict=False):
            one.pool.release(ids)
        raise
    for part, one, ids in zip(parts_of(table), carried, taken, strict=True):
        write_pages(one.pool, ids, one.arrays)
        part.restore(ids[one.which], one.owned)
        more = np.bincount(one.which, minlength=len(ids)) - 1
        one.pool.retain(np.repeat(ids, more))


def read_pages(pool: RefCountedPool[Any], ids: PageIds, part: PagePart = PagePart.ALL) -> Content:
    """The content of the pages: of all arrays of the pool, or of some."""
    return tuple(take(RowArrays.of_pages(pool.arrays, part), ids))


def write_pages(pool: RefCountedPool[Any], ids: PageIds, content: Content, part: PagePart = PagePart.ALL) -> None:
    """Give the pages the content that `read_pages` returned of others, of the same arrays."""
    move_rows(RowArrays.of_tensors(content), None, RowArrays.of_pages(pool.arrays, part), ids, len(ids))


def parts_of(table: PageTable) -> list[Holder]:
    """What holds the pages of a table: its plain part, then its packed ones."""
    return [table, *table.packed_parts]
