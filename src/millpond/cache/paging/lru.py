"""LRU: the page that was not used for the longest time is evicted first."""

from __future__ import annotations

from millpond.cache.paging import paging_rule
from millpond.cache.paging.rule import PageFacts, PagingRule, RankedRule, recency


class LeastRecentlyUsed(RankedRule):
    """Ranks pages by their last access."""

    name = "lru"

    def rank(self, page: int, facts: PageFacts) -> int:
        """See `RankedRule`."""
        return recency(facts)


@paging_rule("lru")
def lru() -> PagingRule:
    """Evict the page that was not used for the longest time."""
    return LeastRecentlyUsed()
