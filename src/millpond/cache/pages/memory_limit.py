"""One memory limit for several page pools, and for the sums that are kept with pages."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.cache.pages.ref_counted_pool import ARENA_BYTES, DEVICE_ARENA_BYTES, Pool, RefCountedPool
from millpond.cache.pages.repack import give_back, spare_pages

#: Arenas that the limit is cut into, so that pools of several shapes can share it.
GRAIN = 64


class MemoryLimit:
    """Bytes that several pools share. What one of them has free goes to another that needs it.

    Args:
        limit_bytes: most bytes of all buffers, free pages included; None for no limit.
        pinned: pages in use stay where they are, since a disk is read into them while others run.

    Attributes:
        pools: those that were made with this account.
    """

    def __init__(self, limit_bytes: int | None, *, pinned: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.pinned = pinned
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
        """Whether all these pages, of pools of this account, can be allocated; no live page moves for it."""
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
        """`can_take`, for which live pages of other pools move together where there are free ones between them.

        Between two passes only: ids of pages that no holder of a pool names become wrong.
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
    """Counts bytes of tensors that lie outside pages; a piece of it is one byte.

    Args:
        account: the limit that they share with the page pools; None: none is known.
    """

    page_bytes = 1

    def __init__(self, account: MemoryLimit | None = None) -> None:
        self._held = 0
        if account is not None:
            account.pools.append(self)

    def take(self, n: int) -> None:
        """`n` more bytes are held. Ask the account for room first."""
        self._held += n

    def release(self, n: int) -> None:
        """`n` bytes are free."""
        self._held -= n
        assert self._held >= 0, "released more than was taken"

    @property
    def n_live(self) -> int:
        """Bytes held."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes held: none is kept free."""
        return self._held

    def bytes_to_grow(self, n: int, *, exact: bool = False) -> int:
        """Bytes that `n` more pieces take."""
        return n

    def trim(self, keep: int = 0) -> int:
        """Nothing is kept free."""
        return 0

    def check_integrity(self, held: int) -> None:
        """Assert that exactly `held` bytes are counted."""
        assert self._held == held, f"{held} bytes of sums, and {self._held} are counted"
