"""Account: several page pools that together never hold more than one limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.cache.counted import ARENA_BYTES
from millpond.cache.pool import PagePool

#: Arenas that the limit is cut into, so that pools of several shapes can share it.
GRAIN = 64


class Account:
    """Bytes that several pools share. What one of them has free at its end goes to another that needs it.

    Args:
        limit_bytes: most bytes of all buffers, free pages included; None for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.pools: list[SharedPool] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of all pools, free pages included."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def live_bytes(self) -> int:
        """Bytes of the pages in use, side arrays included."""
        return sum(pool.n_live * pool.page_bytes for pool in self.pools)

    def open(self, key_dim: int, value_dim: int, *args: Any, **options: Any) -> SharedPool:
        """Another pool on this account; arguments as of `PagePool`.

        Raises:
            OptionError: the limit is smaller than one page.
        """
        arena = ARENA_BYTES if self.limit_bytes is None else min(ARENA_BYTES, self.limit_bytes // GRAIN)
        pool = SharedPool(
            key_dim, value_dim, *args, limit_bytes=self.limit_bytes, arena_bytes=arena, account=self, **options
        )
        self.pools.append(pool)
        return pool

    def can_take(self, pages: Mapping[PagePool, int]) -> bool:
        """Whether all these pages, of pools of this account, can be allocated."""
        if self.limit_bytes is None:
            return True
        need = sum(pool.bytes_to_grow(pages.get(pool, 0)) for pool in self.pools)
        if need and self.nbytes + need > self.limit_bytes:
            for pool in self.pools:
                if not pages.get(pool, 0):
                    pool.trim()
        return not need or self.nbytes + need <= self.limit_bytes


class SharedPool(PagePool):
    """A pool whose limit is that of its account."""

    def __init__(self, *args: Any, account: Account, **options: Any) -> None:
        super().__init__(*args, **options)
        self._account = account

    def can_allocate(self, n: int) -> bool:
        """See `PagePool.can_allocate`; other pools give back what they have free if that is needed."""
        return super().can_allocate(n) and self._account.can_take({self: n})

    def bytes_to_grow(self, n: int) -> int:
        """Bytes of the arenas that `n` more pages need beside the free ones."""
        missing = n - (self.n_pages - self.n_live)
        if missing <= 0:
            return 0
        per_arena = self.arrays.pages_per_arena
        pages = -(-missing // per_arena) * per_arena
        if self.max_pages is not None:
            pages = max(min(pages, self.max_pages - self.n_pages), missing)
        return pages * self.page_bytes
