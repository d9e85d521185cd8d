"""LFU: the page with the fewest accesses since it came is evicted first."""

from __future__ import annotations

from array import array

from millpond.cache.paging import paging_rule
from millpond.cache.paging.rule import DEPTH_BITS, PageFacts, PagingRule, RankedRule, recency

#: Bits of a request's number in a rank.
_REQUEST_BITS = 32
#: More accesses count as this many.
_MOST = (1 << 16) - 1


class LeastFrequentlyUsed(RankedRule):
    """Ranks pages by their accesses since they came, then by the last one."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._counts = array("H")

    def rank(self, page: int, facts: PageFacts) -> int:
        """See `RankedRule`."""
        while page >= len(self._counts):
            self._counts.append(0)
        self._counts[page] = min(self._counts[page] + 1, _MOST)
        last = recency(facts) & (1 << _REQUEST_BITS + DEPTH_BITS) - 1
        return self._counts[page] << _REQUEST_BITS + DEPTH_BITS | last

    def drop(self, page: int) -> None:
        """See `PagingRule`."""
        super().drop(page)
        self._counts[page] = 0


@paging_rule("lfu")
def lfu() -> PagingRule:
    """Evict the page with the fewest accesses since it came; of several the one whose last access is the oldest."""
    return LeastFrequentlyUsed()
