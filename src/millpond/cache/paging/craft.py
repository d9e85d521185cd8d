"""Craft: the page whose uses saved the least is evicted first (Cache-Craft, arXiv:2502.15734)."""

from __future__ import annotations

from array import array

from millpond.cache.paging import paging_rule
from millpond.cache.paging.rule import PageFacts, PagingRule, RankedRule

#: Bits of a request's number in a rank.
_REQUEST_BITS = 32
#: Steps in which gains are summed.
_STEP = 1 / 256
#: Larger sums count as this one, in steps.
_MOST = (1 << 32) - 2


class SummedGain(RankedRule):
    """Ranks pages by f, the sum of `PageFacts.gain` over their accesses.

    Accesses count since the page came, and of equal ones the last decides. A chunk of which the share CFO is computed
    again adds 1 / CFO; whatever is computed in full adds 1.
    """

    name = "craft"

    def __init__(self) -> None:
        super().__init__()
        self._sums = array("Q")  # by page, in steps

    def rank(self, page: int, facts: PageFacts) -> int:
        """See `RankedRule`."""
        while page >= len(self._sums):
            self._sums.append(0)
        self._sums[page] = min(self._sums[page] + round(facts.gain / _STEP), _MOST)
        return self._sums[page] << _REQUEST_BITS | facts.request & (1 << _REQUEST_BITS) - 1

    def drop(self, page: int) -> None:
        """See `PagingRule`."""
        super().drop(page)
        self._sums[page] = 0


@paging_rule("craft")
def craft() -> PagingRule:
    """Evict the chunk with the least f, to which each use adds 1 / CFO.

    Of several the one that was used longest ago is evicted.
    """
    return SummedGain()
