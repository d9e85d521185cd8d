"""PagePool: pages of one shape, handed out and taken back, with reference counts and a hard limit.

A page with more than one holder is never written. The pool knows nothing of sequences, heads or policies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from millpond.errors import OptionError, PoolFullError
from millpond.kernels import ops
from millpond.kernels.pages import PageArrays

PageIds = npt.NDArray[np.int32]

#: Slots per page. Measured: see docs/explanation/page-size.md.
DEFAULT_SLOTS = 32
#: Bytes that one arena takes, at most: the grain in which memory is asked for and given back.
ARENA_BYTES = 8 * 2**20


class PagePool:
    """Fixed-size pages of `slots` entries of one KV head.

    Args:
        key_dim, value_dim: numbers per key and value. dtype: how they are stored.
        slots: entries per page, a power of two.
        limit_bytes: most bytes that the pool may ever hold, side arrays included; None for no limit.
        masses: whether entries carry a mass, as merging policies need it: 4 bytes more per slot.
        arena_bytes: the grain in which memory is asked for, at most.

    Raises:
        OptionError: `slots` is no power of two, or `limit_bytes` is smaller than one page.
    """

    def __init__(
        self,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        slots: int = DEFAULT_SLOTS,
        limit_bytes: int | None = None,
        masses: bool = False,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        check_slots(slots)
        item = torch.empty(0, dtype=dtype).element_size()
        self.kv_bytes_per_page = slots * (key_dim + value_dim) * item
        side_bytes = 12 if masses else 8  # position int32, score float32 and, if any, log mass float32
        self.page_bytes = self.kv_bytes_per_page + slots * side_bytes
        if limit_bytes is not None and limit_bytes < self.page_bytes:
            raise OptionError(f"a limit of {limit_bytes} bytes is smaller than one page of {self.page_bytes} bytes")
        self.max_pages = None if limit_bytes is None else limit_bytes // self.page_bytes
        self.limit_bytes = limit_bytes
        per_arena = _floor_power_of_two(max(1, arena_bytes // self.page_bytes))
        self.arrays = PageArrays(per_arena, slots, key_dim, value_dim, dtype, torch.device(device), masses)
        self._refs: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    @property
    def slots(self) -> int:
        return self.arrays.slots

    @property
    def n_pages(self) -> int:
        """Pages that exist, free ones included."""
        return len(self._refs)

    @property
    def n_live(self) -> int:
        """Pages with at least one holder."""
        return int(np.count_nonzero(self._refs))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers held, free pages included."""
        return self.arrays.nbytes

    def refs(self, ids: PageIds) -> npt.NDArray[np.int32]:
        """How many holders each page has."""
        return self._refs[ids]

    def can_allocate(self, n: int) -> bool:
        """Whether `allocate(n)` would succeed, as far as the limit goes."""
        return self.max_pages is None or self.n_live + n <= self.max_pages

    def allocate(self, n: int) -> PageIds:
        """`n` pages with one holder each, ascending, the lowest free ones first so that neighbours stay together.

        Raises:
            PoolFullError: the limit does not allow it. Nothing was changed.
        """
        if not self.can_allocate(n):
            raise PoolFullError(
                f"the page pool is full: {n} pages of {self.page_bytes} bytes are needed, {self.n_live} of at most "
                f"{self.max_pages} are in use (limit {self.limit_bytes} bytes); what is cached stays readable. "
                "Raise memory_limit, lower the budget, or free a sequence"
            )
        missing = n - (self.n_pages - self.n_live)
        while missing > 0:
            missing -= self._grow()
        ids = np.flatnonzero(self._refs == 0)[:n].astype(np.int32)
        self._refs[ids] = 1
        return ids

    def retain(self, ids: PageIds) -> None:
        """One more holder for each page; a page may be named several times."""
        if np.any(self._refs[ids] == 0):
            raise AssertionError("retained a free page")
        np.add.at(self._refs, ids, 1)

    def release(self, ids: PageIds) -> None:
        """One holder less for each page; a page without holders is free at once."""
        np.subtract.at(self._refs, ids, 1)
        if np.any(self._refs[ids] < 0):
            np.add.at(self._refs, ids, 1)
            raise AssertionError("released a free page")

    def privatise(self, ids: PageIds) -> PageIds:
        """Pages that the caller alone holds, with the content of `ids`: shared ones are copied and released.

        Raises:
            PoolFullError: no room for the copies. Nothing was changed.
        """
        shared = self._refs[ids] > 1
        if not shared.any():
            return ids
        copies = self.allocate(int(shared.sum()))
        ops.copy_pages(self.arrays, torch.from_numpy(ids[shared]).long(), torch.from_numpy(copies).long())
        self.release(ids[shared])
        private = ids.copy()
        private[shared] = copies
        return private

    def trim(self) -> int:
        """Give back arenas at the end that hold no live page. Returns the bytes freed."""
        before = self.nbytes
        step = self.arrays.pages_per_arena
        while self.n_pages and not self._refs[(last := (self.arrays.n_arenas - 1) * step) :].any():
            self._refs = self._refs[:last]
            self.arrays.drop_last_arena()
        return before - self.nbytes

    def check_integrity(self, holders: list[PageIds] | None = None) -> None:
        """Assert the pool's invariants; with `holders` (all tables' page ids), that the counts are exactly theirs."""
        assert (self._refs >= 0).all(), "negative reference count"
        assert self.n_pages == sum(len(k) for k in self.arrays.keys), "counts and arenas disagree"
        assert self.max_pages is None or self.n_pages <= self.max_pages, "more pages than the limit allows"
        if holders is not None:
            counted = np.zeros_like(self._refs)
            for ids in holders:
                np.add.at(counted, ids, 1)
            assert (counted == self._refs).all(), "a page leaked or was freed while held"

    def _grow(self) -> int:
        step = self.arrays.pages_per_arena
        if self.max_pages is not None:
            step = min(step, self.max_pages - self.n_pages)
        self.arrays.add_arena(step)
        self._refs = np.concatenate([self._refs, np.zeros(step, dtype=np.int32)])
        return step


def check_slots(slots: int) -> None:
    """
    Raises:
        OptionError: `slots` is not a power of two.
    """
    if slots < 1 or slots & (slots - 1):
        raise OptionError(f"page_slots={slots} must be a power of two")


def _floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)
