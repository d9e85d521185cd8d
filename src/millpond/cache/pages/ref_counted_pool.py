"""Pages of one shape with reference counts and a hard limit, and the protocol of memory under a shared limit."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from millpond.errors import OptionError, PoolFullError
from millpond.kernels.pages import Arenas


class Pool(Protocol):
    """Memory in pieces of one size.

    Attributes:
        page_bytes: Bytes of one piece.
    """

    page_bytes: int

    @property
    def n_live(self) -> int:
        """Pieces in use."""

    @property
    def nbytes(self) -> int:
        """Bytes of all memory held, free pieces included."""

    def bytes_to_grow(self, n: int, *, exact: bool = False) -> int:
        """Return the bytes that `n` more pieces take after the free ones are used.

        Args:
            n: Number of pieces.
            exact: Whether to count as few bytes as possible.
        """

    def trim(self, keep: int = 0) -> int:
        """Free memory without pieces in use, except for `keep` free pieces; return its bytes."""


PageIds = npt.NDArray[np.int32]

#: Bytes that one arena takes, at most: the unit in which memory is allocated and freed.
ARENA_BYTES = 8 * 2**20
#: The same on an accelerator, which notes the addresses of all arenas again whenever one is added.
DEVICE_ARENA_BYTES = 64 * 2**20
#: Where at least one of this many pages is named, holders of all pages are counted at once, which takes less time.
MANY = 16
#: Holders of a page that does not exist: its arena is empty, or shorter.
_ABSENT = -1


class Limit(Protocol):
    """Limit of several pools together, see `MemoryLimit`."""

    limit_bytes: int | None
    pinned: bool
    pools: list[Pool]

    @property
    def arena_bytes(self) -> int: ...

    @property
    def device_arena_bytes(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def add(self, pool: Pool) -> None: ...

    def can_take(self, pages: Mapping[Pool, int]) -> bool: ...


class PageHolder(Protocol):
    """Holder of pages of pools that follows them when they move."""

    def held_in(self, pool: RefCountedPool[Any]) -> list[PageIds]:
        """Return the pages of a pool that it holds, each as often as it holds it."""

    def follow(self, pool: RefCountedPool[Any], new_ids: PageIds) -> None:
        """Replace each page i of a pool that it holds by page new_ids[i]."""


A = TypeVar("A", bound=Arenas)


class RefCountedPool(Generic[A]):
    """Pages of `arrays`, each with a count of its holders.

    Args:
        arrays: Memory of the pages, empty at first.
        kv_bytes_per_page: Bytes of keys and values per page.
        page_bytes: Bytes of a page with positions and scores.
        limit_bytes: Most bytes that the pool may ever hold; None for no limit.
        memory_limit: Limit of several pools together, in place of `limit_bytes`.

    Attributes:
        holders: Holders of its pages that follow pages which move.

    Raises:
        OptionError: `limit_bytes` is smaller than one page.
    """

    def __init__(
        self,
        arrays: A,
        kv_bytes_per_page: int,
        page_bytes: int,
        limit_bytes: int | None,
        memory_limit: Limit | None = None,
    ) -> None:
        if memory_limit is not None:
            limit_bytes = memory_limit.limit_bytes
        self.arrays = arrays
        self.kv_bytes_per_page, self.page_bytes = kv_bytes_per_page, page_bytes
        self.limit_bytes = limit_bytes
        self.memory_limit = memory_limit
        if memory_limit is None:
            self._check_limit()
        else:
            memory_limit.add(self)
        self._refs: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._lives: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._n_allocations = self._n_absent = 0
        self.n_releases = 0  # calls of `release` so far
        self.holders: weakref.WeakSet[PageHolder] = weakref.WeakSet()

    def _check_limit(self) -> None:
        """Check that the limit holds a page.

        Raises:
            OptionError: it does not.
        """
        if self.max_pages == 0:
            raise OptionError(
                f"a limit of {self.limit_bytes:,} bytes is smaller than one page of {self.page_bytes:,} bytes; raise "
                "memory_limit, or lower page_slots"
            )

    @property
    def slots(self) -> int:
        return self.arrays.slots

    @property
    def max_pages(self) -> int | None:
        """Most pages that the limit allows; None for no limit."""
        return None if self.limit_bytes is None else self.limit_bytes // self.page_bytes

    @property
    def pinned(self) -> bool:
        """Whether arenas keep their address while a page of them is in use."""
        return self.memory_limit is not None and self.memory_limit.pinned

    @property
    def end(self) -> int:
        """Number above all page ids."""
        return len(self._refs)

    @property
    def n_pages(self) -> int:
        """Pages that exist, free ones included."""
        return len(self._refs) - self._n_absent

    @property
    def n_live(self) -> int:
        """Pages with at least one holder."""
        return int(np.count_nonzero(self._refs)) - self._n_absent

    @property
    def n_free(self) -> int:
        """Pages without a holder."""
        return len(self._refs) - int(np.count_nonzero(self._refs))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers held, free pages included."""
        return self.arrays.nbytes

    def by_arena(self) -> npt.NDArray[np.int32]:
        """Return the number of holders of every page, (arenas, pages per arena).

        It is below 0 for pages that a shorter or empty arena lacks.
        """
        return self._refs.reshape(-1, self.arrays.pages_per_arena)

    def refs(self, ids: PageIds) -> npt.NDArray[np.int32]:
        """Return the number of holders of each page."""
        return self._refs[ids]

    def lives(self, ids: PageIds) -> npt.NDArray[np.int64]:
        """Return a number of each page that changes once it was free and is in use again."""
        return self._lives[ids]

    def can_allocate(self, n: int) -> bool:
        """Whether the limit allows `allocate(n)`; other pools give free memory back for it."""
        if self.max_pages is not None and self.n_live + n > self.max_pages:
            return False
        return self.memory_limit is None or self.memory_limit.can_take({self: n})

    def bytes_to_grow(self, n: int, *, exact: bool = False) -> int:
        """Return the bytes of arenas that `n` more pages need after the free ones are used.

        Args:
            n: Number of pages.
            exact: Whether an arena may be shorter than the others.
        """
        missing = n - self.n_free
        if missing <= 0:
            return 0
        return (missing if exact and not self.pinned else self._in_arenas(missing)) * self.page_bytes

    def grow(self, n: int) -> None:
        """Have at least `n` free pages, and no more than that unless there are more now."""
        if (missing := n - self.n_free) > 0:
            self._extend_by(missing if not self.pinned else self._in_arenas(missing))

    def allocate(self, n: int) -> PageIds:
        """Return `n` pages with one holder each, ascending: the lowest free ones are neighbours.

        Raises:
            PoolFullError: the limit does not allow it. Nothing was changed.
        """
        if not self.can_allocate(n):
            self._check_limit()
            raise PoolFullError(
                f"the page pool is full: {n} pages of {self.page_bytes} bytes are needed, {self.n_live} of at most "
                f"{self.max_pages} are in use (limit {self.limit_bytes} bytes); what is cached stays readable. "
                "Raise memory_limit, lower the budget, or free a sequence"
            )
        missing = n - self.n_free
        while missing > 0:
            missing -= self._grow(missing)
        ids = np.flatnonzero(self._refs == 0)[:n].astype(np.int32)
        self._refs[ids] = 1
        self._n_allocations += 1
        self._lives[ids] = self._n_allocations
        return ids

    def retain(self, ids: PageIds) -> None:
        """Add one holder to each page; a page may be named several times."""
        if (self._refs[ids] <= 0).any():
            raise AssertionError("retained a free page")
        self._count(ids, 1)

    def release(self, ids: PageIds) -> None:
        """Remove one holder from each page; a page without holders is free at once."""
        self.n_releases += 1
        self._count(ids, -1)
        if (self._refs[ids] < 0).any():
            self._count(ids, 1)
            raise AssertionError("released a free page")

    def privatise(self, ids: PageIds) -> PageIds:
        """Return pages that only the caller holds, with the content of `ids`.

        Shared pages are copied and released.

        Raises:
            PoolFullError: no room for the copies. Nothing was changed.
        """
        shared = self._refs[ids] > 1
        if not shared.any():
            return ids
        copies = self.allocate(int(shared.sum()))
        self.arrays.copy_pages(ids[shared], copies)
        self.release(ids[shared])
        private = ids.copy()
        private[shared] = copies
        return private

    def trim(self, keep: int = 0) -> int:
        """Free arenas without live pages, except for `keep` free pages; return the bytes freed."""
        previous_bytes, spare = self.nbytes, self.n_free - keep
        holders = self.by_arena()
        sizes = (holders >= 0).sum(1)
        unused = np.flatnonzero((sizes > 0) & (sizes <= spare) & ~(holders > 0).any(1))[::-1].tolist()
        if not unused:
            return 0
        with self.arrays.changing():
            for number in unused:
                n = int(sizes[number])
                if n <= spare and (number or self.n_pages == n):
                    self.resize(number, 0)
                    spare -= n
        return previous_bytes - self.nbytes

    # ------------------------------------------------------------------ arenas

    def size_of(self, arena: int) -> int:
        """Return the number of pages of an arena."""
        return len(self.arrays.arrays[0][arena])

    def resize(self, arena: int, n: int) -> None:
        """Let an arena have its first `n` pages. No live page is after them."""
        step = self.arrays.pages_per_arena
        self.arrays.resize_arena(arena, n)
        arena_refs = self._refs[arena * step : (arena + 1) * step]
        arena_refs[:n] = np.maximum(arena_refs[:n], 0)
        arena_refs[n:] = _ABSENT
        while self.arrays.n_arenas and not self.size_of(last := self.arrays.n_arenas - 1):
            self.arrays.drop_last_arena()
            self._refs, self._lives = self._refs[: last * step], self._lives[: last * step]
        self._n_absent = int((self._refs < 0).sum())

    def move(self, source: PageIds, target: PageIds) -> None:
        """Move live pages `source` (n,) to free pages `target` (n,); holders follow later."""
        self.arrays.copy_pages(source, target)
        self._refs[target], self._lives[target] = self._refs[source], self._lives[source]
        self._refs[source] = 0

    def check_integrity(self, holders: list[PageIds] | None = None) -> None:
        """Assert the pool's invariants.

        Args:
            holders: Page ids of all tables, to assert that the counts are exactly theirs.
        """
        assert int((self._refs < 0).sum()) == self._n_absent, "negative reference count"
        assert self.n_pages == sum(len(arena) for arena in self.arrays.arrays[0]), "counts and arenas disagree"
        assert self.limit_bytes is None or self.nbytes <= self.limit_bytes, "more bytes than the limit allows"
        if holders is not None:
            counted = np.zeros_like(self._refs)
            for ids in holders:
                np.add.at(counted, ids, 1)
            assert (counted == np.maximum(self._refs, 0)).all(), "a page leaked or was freed while held"

    def _count(self, ids: PageIds, more: int) -> None:
        """Give each page `more` holders for each time that it is named."""
        if len(ids) < len(self._refs) // MANY:
            np.add.at(self._refs, ids, more)
        else:
            self._refs += more * np.bincount(ids, minlength=len(self._refs)).astype(np.int32)

    def _grow(self, missing: int) -> int:
        """Allocate free pages, if possible `missing`; return how many."""
        n = self._in_arenas(missing)
        if self.limit_bytes is not None and not self.pinned:
            used_bytes = self.nbytes if self.memory_limit is None else self.memory_limit.nbytes
            n = n if used_bytes + n * self.page_bytes <= self.limit_bytes else missing
        self._extend_by(n)
        return n

    def _in_arenas(self, missing: int) -> int:
        """Return the pages to add if `missing` are needed: whole arenas, if the limit allows it."""
        step = self.arrays.pages_per_arena
        gap = self._gap()[1]
        pages = gap + -(-max(0, missing - gap) // step) * step
        return pages if self.max_pages is None else max(min(pages, self.max_pages - self.n_pages), missing)

    def _gap(self) -> tuple[int, int]:
        """Return the number of a shorter arena and how many pages it lacks; (0, 0) for none."""
        step = self.arrays.pages_per_arena
        if not self._n_absent or self.pinned:
            return 0, 0
        sizes = [self.size_of(number) for number in range(self.arrays.n_arenas)]
        return next(((number, step - n) for number, n in enumerate(sizes) if 0 < n < step), (0, 0))

    def _extend_by(self, n: int) -> None:
        """Add `n` free pages."""
        step = self.arrays.pages_per_arena
        with self.arrays.changing():
            arena, gap = self._gap()
            if gap:
                self.resize(arena, step - gap + min(n, gap))
                n -= min(n, gap)
            empty = [number for number in range(self.arrays.n_arenas) if not self.size_of(number)]
            while n > 0:
                size = min(n, step)
                if empty:
                    self.resize(empty.pop(0), size)
                else:
                    self.arrays.add_arena(size)
                    self._add_ids(step)
                    self._refs[len(self._refs) - step + size :] = _ABSENT
                    self._n_absent += step - size
                n -= size

    def _add_ids(self, n: int) -> None:
        """Count the holders of `n` more free pages."""
        self._refs = np.concatenate([self._refs, np.zeros(n, dtype=np.int32)])
        self._lives = np.concatenate([self._lives, np.zeros(n, dtype=np.int64)])


def arena_bytes_on(device: torch.device, memory_limit: Limit | None) -> int:
    """Return the bytes of an arena of a pool on a device, under a limit or none."""
    if device.type == "cpu":
        return ARENA_BYTES if memory_limit is None else memory_limit.arena_bytes
    return DEVICE_ARENA_BYTES if memory_limit is None else memory_limit.device_arena_bytes


def pages_per_arena(page_bytes: int, arena_bytes: int = ARENA_BYTES) -> int:
    """Return the largest power of two of pages that fits `arena_bytes` bytes, at least 1."""
    return 1 << (max(1, arena_bytes // page_bytes).bit_length() - 1)
