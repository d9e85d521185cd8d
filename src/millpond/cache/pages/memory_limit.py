"""One memory limit for several page pools."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.cache.pages.pool_protocol import Pool
from millpond.cache.pages.ref_counted_pool import ARENA_BYTES, DEVICE_ARENA_BYTES

#: Arenas that the limit is cut into, so that pools of several shapes can share it.
GRAIN = 64


class MemoryLimit:
    """Bytes that several pools share. What one of them has free at its end goes to another that needs it.

    Args:
        limit_bytes: most bytes of all buffers, free pages included; None for no limit.

    Attributes:
        pools: those that were made with this account.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.pools: list[Pool] = []

    @property
    def arena_bytes(self) -> int:
        """The grain in which its pools take memory of the host."""
        return self._grain(ARENA_BYTES)

    @property
    def device_arena_bytes(self) -> int:
        """The grain in which its pools take memory of an accelerator."""
        return self._grain(DEVICE_ARENA_BYTES)

    def _grain(self, most: int) -> int:
        return most if self.limit_bytes is None else min(most, self.limit_bytes // GRAIN)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of all pools, free pages included."""
        return sum([pool.nbytes for pool in self.pools])

    @property
    def live_bytes(self) -> int:
        """Bytes of the pages in use, side arrays included."""
        return sum(pool.n_live * pool.page_bytes for pool in self.pools)

    def can_take(self, pages: Mapping[Pool, int]) -> bool:
        """Whether all these pages, of pools of this account, can be allocated."""
        if self.limit_bytes is None:
            return True
        need = sum(pool.bytes_to_grow(n) for pool, n in pages.items() if n)
        if need and self.nbytes + need > self.limit_bytes:
            for pool in self.pools:
                if not pages.get(pool, 0):
                    pool.trim()
        return not need or self.nbytes + need <= self.limit_bytes
