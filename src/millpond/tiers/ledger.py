"""Tiers where weights and KV are stored, and the ledger of bytes that refuses what a tier cannot hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from millpond.errors import BudgetError

Kind = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class Tier:
    """Memory or disk with a capacity.

    Attributes:
        name: Key of the tier in a ledger.
        kind: Kind of memory.
        capacity_bytes: Most bytes that it may hold; None for no limit.
    """

    name: str
    kind: Kind
    capacity_bytes: int | None = None


class Holding:
    """Bytes of a tier taken for one purpose until they are released."""

    def __init__(self, ledger: Ledger, tier: str, purpose: str, nbytes: int) -> None:
        self.tier, self.purpose, self.nbytes = tier, purpose, nbytes
        self._ledger = ledger
        self._released = False

    def release(self) -> None:
        """Give the bytes back; a second call changes nothing."""
        if not self._released:
            self._released = True
            self._ledger._give_back(self)


class Ledger:
    """Record of the bytes taken of each tier, by purpose.

    Memory is taken here before it is allocated.

    Args:
        tiers: Tiers that bytes can be taken of.

    Raises:
        BudgetError: more is taken of a tier than it has; nothing changes then.

    Example:
        >>> ledger = Ledger([Tier("host", "host", 100)])
        >>> weights = ledger.take("host", "weights", 60)
        >>> ledger.free("host"), ledger.by_purpose("host")
        (40, {'weights': 60})
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._taken: dict[str, Counter[str]] = {name: Counter() for name in self._tiers}
        self._peak = dict.fromkeys(self._tiers, 0)

    def take(self, tier: str, purpose: str, nbytes: int) -> Holding:
        """Take `nbytes` of a tier.

        Raises:
            BudgetError: the tier has fewer.
        """
        assert nbytes >= 0, "bytes are counted"
        free = self.free(tier)
        if free is not None and nbytes > free:
            raise BudgetError(
                f"{purpose} takes {nbytes:,} bytes of the tier {tier!r}, which has {free:,} free of "
                f"{self._tiers[tier].capacity_bytes:,} ({self._shown(tier)}); raise its capacity"
            )
        self._taken[tier][purpose] += nbytes
        self._peak[tier] = max(self._peak[tier], self.used(tier))
        return Holding(self, tier, purpose, nbytes)

    def used(self, tier: str) -> int:
        """Return the bytes taken now."""
        return sum(self._taken[tier].values())

    def peak(self, tier: str) -> int:
        """Return the most bytes that were taken at a time."""
        return self._peak[tier]

    def free(self, tier: str) -> int | None:
        """Return the bytes that can still be taken, or None if the tier has no limit."""
        capacity = self._tiers[tier].capacity_bytes
        return None if capacity is None else capacity - self.used(tier)

    def by_purpose(self, tier: str) -> Mapping[str, int]:
        """Return the bytes taken now, by purpose."""
        return {purpose: nbytes for purpose, nbytes in self._taken[tier].items() if nbytes}

    def _give_back(self, holding: Holding) -> None:
        self._taken[holding.tier][holding.purpose] -= holding.nbytes
        assert self._taken[holding.tier][holding.purpose] >= 0, "what is given back was taken"

    def _shown(self, tier: str) -> str:
        taken = self.by_purpose(tier)
        return ", ".join(f"{purpose} {nbytes:,}" for purpose, nbytes in taken.items()) or "nothing is taken"
