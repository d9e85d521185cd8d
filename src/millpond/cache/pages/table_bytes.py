"""Bytes of a page table: of keys and values in the pages of its sequences, and of the table itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.pages.region_arrays import Ints


def own_bytes(table: PageTable) -> int:
    """Return the bytes of the page ids, lengths and budgets themselves."""
    numbers = (table.pages, table.lens, table.capacities, table.recent)
    plain_bytes = sum(t.numel() * t.element_size() for t in numbers)
    return plain_bytes if table.quantized is None else plain_bytes + table.quantized.nbytes


def kv_bytes(table: PageTable) -> npt.NDArray[np.int64]:
    """Return the bytes of keys and values in the pages that each sequence needs, (n_seq,)."""
    pages: npt.NDArray[np.int64] = (-(-table.lengths() // table.pool.slots)).sum(1).astype(np.int64)
    plain_bytes = pages * table.pool.kv_bytes_per_page
    return plain_bytes if table.quantized is None else plain_bytes + table.quantized.kv_bytes()


def used_bytes(table: PageTable) -> npt.NDArray[np.int64]:
    """Return the bytes of `kv_bytes` that are in slots with an entry, (n_seq,)."""
    packed = (_slot_bytes(part.pool, part.live) for part in table.packed_parts)
    return sum(packed, _slot_bytes(table.pool, table.lengths()))


def _slot_bytes(pool: RefCountedPool[Any], entries: Ints) -> npt.NDArray[np.int64]:
    """Return the bytes of keys and values, (n_seq,), in slots of entries (n_seq, n_kv_heads)."""
    n_bytes: npt.NDArray[np.int64] = entries.sum(1).astype(np.int64) * pool.kv_bytes_per_page // pool.slots
    return n_bytes
