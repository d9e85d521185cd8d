"""Pages of one shape with reference counts and a hard limit.

A page with more than one holder is never written. The pool knows nothing of sequences, heads or policies, nor of what
lies in its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from millpond.cache.pages.pool_protocol import Pool
from millpond.errors import OptionError, PoolFullError
from millpond.kernels.arenas import Arenas

PageIds = npt.NDArray[np.int32]

#: Bytes that one arena takes, at most: the unit in which memory is allocated and freed.
ARENA_BYTES = 8 * 2**20
#: The same on an accelerator, which notes the addresses of all arenas again whenever one is added.
DEVICE_ARENA_BYTES = 64 * 2**20
#: Where at least one of this many pages is named, holders of all pages are counted at once, which takes less time.
MANY = 16


class Limit(Protocol):
    """What several pools may hold together."""

    limit_bytes: int | None
    pools: list[Pool]

    @property
    def arena_bytes(self) -> int: ...

    @property
    def device_arena_bytes(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def can_take(self, pages: Mapping[Pool, int]) -> bool: ...


A = TypeVar("A", bound=Arenas)


class RefCountedPool(Generic[A]):
    """Pages of `arrays`, each with a count of its holders.

    Args:
        arrays: the memory, empty at first.
        kv_bytes_per_page, page_bytes: of keys and values alone, and with positions and scores.
        limit_bytes: most bytes that the pool may ever hold; None for no limit.
        account: the limit of several pools together, in place of `limit_bytes`.

    Raises:
        OptionError: `limit_bytes` is smaller than one page.
    """

    def __init__(
        self,
        arrays: A,
        kv_bytes_per_page: int,
        page_bytes: int,
        limit_bytes: int | None,
        account: Limit | None = None,
    ) -> None:
        if account is not None:
            limit_bytes = account.limit_bytes
        if limit_bytes is not None and limit_bytes < page_bytes:
            raise OptionError(f"a limit of {limit_bytes} bytes is smaller than one page of {page_bytes} bytes")
        self.arrays = arrays
        self.kv_bytes_per_page, self.page_bytes = kv_bytes_per_page, page_bytes
        self.limit_bytes = limit_bytes
        self.account = account
        if account is not None:
            account.pools.append(self)
        self._refs: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._lives: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._n_allocations = 0
        self.n_releases = 0  # calls of `release` so far

    def _copy(self, source: PageIds, target: PageIds) -> None:
        """Copy whole pages, source[i] to target[i]."""
        there = self.arrays.device
        self.arrays.copy_pages(*(torch.from_numpy(ids).to(there).long() for ids in (source, target)))

    @property
    def slots(self) -> int:
        return self.arrays.slots

    @property
    def max_pages(self) -> int | None:
        """Most pages that the limit allows; None for no limit."""
        return None if self.limit_bytes is None else self.limit_bytes // self.page_bytes

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

    def lives(self, ids: PageIds) -> npt.NDArray[np.int64]:
        """A number of each page that is another one once it was free and is in use again."""
        return self._lives[ids]

    def can_allocate(self, n: int) -> bool:
        """Whether `allocate(n)` would succeed, as far as the limit goes; other pools give back what they have free."""
        if self.max_pages is not None and self.n_live + n > self.max_pages:
            return False
        return self.account is None or self.account.can_take({self: n})

    def bytes_to_grow(self, n: int) -> int:
        """Bytes of the arenas that `n` more pages need after the free ones are used."""
        missing = n - (self.n_pages - self.n_live)
        if missing <= 0:
            return 0
        per_arena = self.arrays.pages_per_arena
        pages = -(-missing // per_arena) * per_arena
        if self.max_pages is not None:
            pages = max(min(pages, self.max_pages - self.n_pages), missing)
        return pages * self.page_bytes

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
            missing -= self._grow(missing)
        ids = np.flatnonzero(self._refs == 0)[:n].astype(np.int32)
        self._refs[ids] = 1
        self._n_allocations += 1
        self._lives[ids] = self._n_allocations
        return ids

    def retain(self, ids: PageIds) -> None:
        """One more holder for each page; a page may be named several times."""
        if not self._refs[ids].all():
            raise AssertionError("retained a free page")
        self._count(ids, 1)

    def release(self, ids: PageIds) -> None:
        """One holder less for each page; a page without holders is free at once."""
        self.n_releases += 1
        self._count(ids, -1)
        if (self._refs[ids] < 0).any():
            self._count(ids, 1)
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
        self._copy(ids[shared], copies)
        self.release(ids[shared])
        private = ids.copy()
        private[shared] = copies
        return private

    def trim(self) -> int:
        """Free arenas at the end that hold no live page. Returns the bytes freed."""
        before = self.nbytes
        step = self.arrays.pages_per_arena
        while self.n_pages and not self._refs[(last := (self.arrays.n_arenas - 1) * step) :].any():
            self._refs, self._lives = self._refs[:last], self._lives[:last]
            self.arrays.drop_last_arena()
        return before - self.nbytes

    def check_integrity(self, holders: list[PageIds] | None = None) -> None:
        """Assert the pool's invariants; with `holders` (all tables' page ids), that the counts are exactly theirs."""
        assert (self._refs >= 0).all(), "negative reference count"
        assert self.n_pages == sum(len(arena) for arena in self.arrays.arrays[0]), "counts and arenas disagree"
        assert self.limit_bytes is None or self.nbytes <= self.limit_bytes, "more bytes than the limit allows"
        if holders is not None:
            counted = np.zeros_like(self._refs)
            for ids in holders:
                np.add.at(counted, ids, 1)
            assert (counted == self._refs).all(), "a page leaked or was freed while held"

    def _count(self, ids: PageIds, more: int) -> None:
        """Let each page have `more` holders for each time that it is named."""
        if len(ids) < len(self._refs) // MANY:
            np.add.at(self._refs, ids, more)
        else:
            self._refs += more * np.bincount(ids, minlength=len(self._refs)).astype(np.int32)

    def _grow(self, missing: int) -> int:
        """Have more free pages, of which `missing` are wanted; returns how many more."""
        step = self.arrays.pages_per_arena
        if self.max_pages is not None:
            step = min(step, self.max_pages - self.n_pages)
        assert step > 0, "allocate asks before it grows"
        self.arrays.add_arena(step)
        self._add_ids(step)
        return step

    def _add_ids(self, n: int) -> None:
        """Count the holders of `n` more pages, which are free."""
        self._refs = np.concatenate([self._refs, np.zeros(n, dtype=np.int32)])
        self._lives = np.concatenate([self._lives, np.zeros(n, dtype=np.int64)])


def arena_bytes_on(device: torch.device, account: Limit | None) -> int:
    """Bytes of an arena of a pool on a device, whose limit is `account`; None: it has none."""
    if device.type == "cpu":
        return ARENA_BYTES if account is None else account.arena_bytes
    return DEVICE_ARENA_BYTES if account is None else account.device_arena_bytes


def pages_per_arena(page_bytes: int, arena_bytes: int = ARENA_BYTES) -> int:
    """The largest power of two of pages that an arena of `arena_bytes` bytes holds, at least 1."""
    return 1 << (max(1, arena_bytes // page_bytes).bit_length() - 1)
