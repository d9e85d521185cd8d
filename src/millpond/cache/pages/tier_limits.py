"""Memory limits of two tiers: pools of near layers are under one, pools of far layers under the other."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.ref_counted_pool import Pool


class TierLimits(MemoryLimit):
    """Limit of all pools of an engine with KV on a device and in the host's memory.

    No tier lends memory to the other. States and sums count in the near one.

    Args:
        near_bytes: Most bytes on the device; None for no limit.
        far_bytes: Most bytes in the host's memory; None for no limit.
        pinned: Whether pages of the host in use keep their address, see `MemoryLimit`.

    Attributes:
        near: Limit of the device's pools.
        far: Limit of the host's pools.
    """

    def __init__(self, near_bytes: int | None, far_bytes: int | None, *, pinned: bool = False) -> None:
        given = [nbytes for nbytes in (near_bytes, far_bytes) if nbytes is not None]
        super().__init__(sum(given) if given else None, pinned=pinned)
        self.near = _TierLimit(self, near_bytes)
        self.far = _TierLimit(self, far_bytes, pinned=pinned)

    def add(self, pool: Pool) -> None:
        self.near.add(pool)

    def can_take(self, pages: Mapping[Pool, int]) -> bool:
        return self.near.can_take(pages) and self.far.can_take(pages)

    def make_room(self, pages: Mapping[Pool, int]) -> bool:
        return self.near.make_room(pages) and self.far.make_room(pages)

    def scaled(self, near_bytes: int, far_bytes: int) -> int:
        """Return what counts against `limit_bytes` of a need of each tier.

        It is that share of all bytes which the need is of its tier, of the tier where it is more.

        Example:
            >>> TierLimits(100, 300).scaled(50, 30)
            200
        """
        if self.limit_bytes is None:
            return near_bytes + far_bytes
        needs = ((near_bytes, self.near.limit_bytes), (far_bytes, self.far.limit_bytes))
        total = self.limit_bytes
        return max(
            (-(-need * total // limit) if limit else total + 1)
            for need, limit in needs
            if limit is not None and (limit or need)
        )

    @property
    def within(self) -> bool:
        """Whether each tier holds at most its limit."""
        return all(one.limit_bytes is None or one.nbytes <= one.limit_bytes for one in (self.near, self.far))


class _TierLimit(MemoryLimit):
    """Limit of the pools of one tier, which are pools of the whole too."""

    def __init__(self, whole: MemoryLimit, limit_bytes: int | None, *, pinned: bool = False) -> None:
        super().__init__(limit_bytes, pinned=pinned)
        self._whole = whole

    def add(self, pool: Pool) -> None:
        self.pools.append(pool)
        self._whole.pools.append(pool)

    def can_take(self, pages: Mapping[Pool, int]) -> bool:
        return super().can_take(self._own(pages))

    def make_room(self, pages: Mapping[Pool, int]) -> bool:
        return super().make_room(self._own(pages))

    def _own(self, pages: Mapping[Pool, int]) -> dict[Pool, int]:
        return {pool: n for pool, n in pages.items() if any(pool is one for one in self.pools)}
