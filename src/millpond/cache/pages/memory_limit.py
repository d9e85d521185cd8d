"""Memory limit of several page pools and of the sums that are stored with pages."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.cache.pages.ref_counted_pool import ARENA_BYTES, DEVICE_ARENA_BYTES, Pool, RefCountedPool
from millpond.cache.pages.repack import give_back, spare_pages

#: Arenas that the limit is cut into, so that pools of several shapes can share it.
GRAIN = 64


class MemoryLimit:
    """Bytes that several pools share: free memory of one goes to another that needs it.

    Args:
        limit_bytes: Most bytes of all buffers, free pages included; None for no limit.
        pinned: Whether pages in use keep their address, because a disk is read into them while others run.

    Attributes:
        pools: Pools under this limit.
    """

    def __init__(self, limit_bytes: int | None, *, pinned: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.pinned = pinned
        self.pools: list[Pool] = []

    def add(self, pool: Pool) -> None:
        """Count a pool under this limit."""
        self.pools.append(pool)

    @property
    def arena_bytes(self) -> int:
        """Bytes in which its pools allocate memory of the host."""
        return self._grain(ARENA_BYTES)

    @property
    def device_arena_bytes(self) -> int:
        """Bytes in which its pools allocate memory of an accelerator."""
        return self._grain(DEVICE_ARENA_BYTES)

    def _grain(self, max_bytes: int) -> int:
        return max_bytes if self.limit_bytes is None else min(max_bytes, self.limit_bytes // GRAIN)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of all pools, free pages included."""
        return sum([pool.nbytes for pool in self.pools])

    @property
    def live_bytes(self) -> int:
        """Bytes of the pages in use, side arrays included."""
        return sum(pool.n_live * pool.page_bytes for pool in self.pools)

    def can_take(self, pages: Mapping[Pool, int]) -> bool:
        """Whether all these pages, of pools under this limit, can be allocated without moving any."""
        if self.limit_bytes is None or self._fits(pages):
            return True
        for pool in self.pools:
            pool.trim(keep=pages.get(pool, 0))
        if self._fits(pages):
            return True
        if not self._fits(pages, exact=True):
            return False
        for pool, n in pages.items():
            if isinstance(pool, RefCountedPool):
                pool.grow(n)
        return True

    def make_room(self, pages: Mapping[Pool, int]) -> bool:
        """Whether all these pages can be allocated; live pages of other pools may move for it.

        They move together if free pages are between them. Call it only between two passes: ids of pages that no holder
        of a pool names become wrong.
        """
        if self.limit_bytes is None or self.can_take(pages):
            return True
        need = sum(pool.bytes_to_grow(n, exact=True) for pool, n in pages.items() if n)
        short = self.nbytes + need - self.limit_bytes
        spare = {
            pool: spare_pages(pool, pages.get(pool, 0)) * pool.page_bytes
            for pool in self.pools
            if isinstance(pool, RefCountedPool)
        }
        if short > sum(spare.values()):
            return False
        for pool in sorted(spare, key=spare.__getitem__, reverse=True):
            n = min(spare[pool], short)
            if n > 0:
                short -= give_back(pool, -(-n // pool.page_bytes)) * pool.page_bytes
        return self.can_take(pages)

    def _fits(self, pages: Mapping[Pool, int], *, exact: bool = False) -> bool:
        need = sum(pool.bytes_to_grow(n, exact=exact) for pool, n in pages.items() if n)
        return not need or self.limit_bytes is None or self.nbytes + need <= self.limit_bytes


class SumMemory:
    """Count of the bytes of tensors outside pages; its piece is one byte.

    Args:
        memory_limit: Limit that they share with the page pools; None if there is none.
    """

    page_bytes = 1

    def __init__(self, memory_limit: MemoryLimit | None = None) -> None:
        self._held = 0
        if memory_limit is not None:
            memory_limit.add(self)

    def take(self, n: int) -> None:
        """Count `n` more bytes. The caller asks the limit for room first."""
        self._held += n

    def release(self, n: int) -> None:
        """Count `n` bytes less."""
        self._held -= n
        assert self._held >= 0, "released more than was taken"

    @property
    def n_live(self) -> int:
        """Bytes that are counted."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes that are counted: none is kept free."""
        return self._held

    def bytes_to_grow(self, n: int, *, exact: bool = False) -> int:
        """Return the bytes that `n` more pieces take."""
        return n

    def trim(self, keep: int = 0) -> int:
        """Free nothing: no byte is kept free."""
        return 0

    def check_integrity(self, held: int) -> None:
        """Assert that exactly `held` bytes are counted."""
        assert self._held == held, f"{held} bytes of sums, and {self._held} are counted"
