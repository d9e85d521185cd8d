"""Bytes of a page table: of keys and values in the pages of its sequences, and of the table itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.pages.region_arrays import Ints
from millpond.kernels.transfers import ReadBack

Bytes = npt.NDArray[np.int64]


class TableSizes(NamedTuple):
    """Entries of a table at one moment, and the pools of their pages."""

    pool: RefCountedPool[Any]
    plain: Ints  #: (n_seq, n_kv_heads) entries in plain pages
    packed: list[tuple[RefCountedPool[Any], Ints]]  #: of each tier of codes, its pool and (n_seq, n_kv_heads) entries
    packed_bytes: Bytes | int  #: (n_seq,) of keys and values in the pages of codes; 0 without any

    @classmethod
    def of(cls, table: PageTable) -> TableSizes:
        """Return those of a table now; this waits for lengths that only the device knows."""
        packed: list[tuple[RefCountedPool[Any], Ints]] = [(part.pool, part.live) for part in table.packed_parts]
        return cls(table.pool, table.lengths(), packed, _packed_bytes(table))

    @property
    def entries(self) -> Ints:
        """(n_seq, n_kv_heads) entries in all pages."""
        return sum((live for _, live in self.packed), self.plain)

    @property
    def kv_bytes(self) -> Bytes:
        """(n_seq,) bytes of keys and values in the pages that each sequence needs."""
        pages: Bytes = (-(-self.plain // self.pool.slots)).sum(1).astype(np.int64)
        return pages * self.pool.kv_bytes_per_page + self.packed_bytes

    @property
    def used_bytes(self) -> Bytes:
        """(n_seq,) bytes of `kv_bytes` that are in slots with an entry."""
        packed = (_slot_bytes(pool, live) for pool, live in self.packed)
        return sum(packed, _slot_bytes(self.pool, self.plain))


class _Newer(NamedTuple):
    """Numbers that the host knows of a table of which the device knows newer ones."""

    pool: RefCountedPool[Any]
    slots_used: list[tuple[RefCountedPool[Any], Ints]]  #: of each tier of codes, its pool and its slots in use, (R,)
    packed_bytes: Bytes | int
    shape: tuple[int, int]  #: n_seq, n_kv_heads

    @classmethod
    def of(cls, table: PageTable) -> _Newer:
        used: list[tuple[RefCountedPool[Any], Ints]] = [(part.pool, part.lens.copy()) for part in table.packed_parts]
        return cls(table.pool, used, _packed_bytes(table), (table.n_seq, table.n_kv_heads))

    @property
    def counts(self) -> tuple[int, int]:
        """Rows of `with_counts`."""
        return 1 + len(self.slots_used), self.shape[0] * self.shape[1]

    def with_counts(self, counts: Ints) -> TableSizes:
        """Return the sizes for numbers of the device, (1 + tiers, R).

        They are those of plain entries, then of each tier's tombstones.
        """
        packed = [
            (pool, (used - dead).reshape(self.shape))
            for (pool, used), dead in zip(self.slots_used, counts[1:], strict=True)
        ]
        return TableSizes(self.pool, counts[0].reshape(self.shape), packed, self.packed_bytes)


class SizesToCome:
    """Sizes of some tables as they are now, for which nobody waits before they are needed.

    Args:
        tables: Tables, of which the device may know more than the host.
    """

    def __init__(self, tables: Sequence[PageTable]) -> None:
        self._sizes: list[TableSizes | _Newer] = [
            _Newer.of(table) if table.is_behind else TableSizes.of(table) for table in tables
        ]
        counts: dict[torch.device, list[Tensor]] = {}
        self._numbers: dict[torch.device, list[int]] = {}
        for number, table in enumerate(tables):
            if table.is_behind:
                device = table.lens.device
                counts.setdefault(device, []).extend(table.newer_counts())
                self._numbers.setdefault(device, []).append(number)
        self._reads = [ReadBack([torch.cat(there)]) for there in counts.values()]

    def wait(self) -> list[TableSizes]:
        """Return the sizes, once the work before them is done."""
        for read, numbers in zip(self._reads, self._numbers.values(), strict=True):
            (counts,), at = read.wait(), 0
            for number in numbers:
                newer = self._sizes[number]
                assert isinstance(newer, _Newer), "the sizes are read once"
                n = newer.counts[0] * newer.counts[1]
                self._sizes[number] = newer.with_counts(counts[at : at + n].numpy().reshape(newer.counts))
                at += n
        return [sizes for sizes in self._sizes if isinstance(sizes, TableSizes)]


def own_bytes(table: PageTable) -> int:
    """Return the bytes of the page ids, lengths and budgets themselves."""
    numbers = (table.pages, table.lens, table.capacities, table.recent)
    plain_bytes = sum(t.numel() * t.element_size() for t in numbers)
    return plain_bytes if table.quantized is None else plain_bytes + table.quantized.nbytes


def kv_bytes(table: PageTable) -> Bytes:
    """Return the bytes of keys and values in the pages that each sequence needs, (n_seq,)."""
    return TableSizes.of(table).kv_bytes


def used_bytes(table: PageTable) -> Bytes:
    """Return the bytes of `kv_bytes` that are in slots with an entry, (n_seq,)."""
    return TableSizes.of(table).used_bytes


def _packed_bytes(table: PageTable) -> Bytes | int:
    return 0 if table.quantized is None else table.quantized.kv_bytes()


def _slot_bytes(pool: RefCountedPool[Any], entries: Ints) -> Bytes:
    """Return the bytes of keys and values, (n_seq,), in slots of entries (n_seq, n_kv_heads)."""
    n_bytes: Bytes = entries.sum(1).astype(np.int64) * pool.kv_bytes_per_page // pool.slots
    return n_bytes
