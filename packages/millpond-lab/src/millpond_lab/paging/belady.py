"""Belady: the page whose next use is furthest away is evicted first; for replays, which know the future."""

from __future__ import annotations

from millpond.cache.paging import paging_rule
from millpond.cache.paging.rule import DEPTH_BITS, PageFacts, PagingRule, RankedRule, recency

#: Later than any request.
_NEVER = 1 << 47


class Belady(RankedRule):
    """Ranks pages by their next use, the furthest first; pages that are not used again by their last access.

    Least misses of all rules where every page must come in when it is used (Belady, 1966). A page is used whenever one
    behind it is, so that the furthest next use is that of a page that none follows.
    """

    name = "belady"

    def rank(self, page: int, facts: PageFacts) -> int:
        """See `RankedRule`."""
        if facts.next_use is None:
            return recency(facts) & (1 << DEPTH_BITS) - 1
        return _NEVER - facts.next_use << DEPTH_BITS | recency(facts) & (1 << DEPTH_BITS) - 1


@paging_rule("belady")
def belady() -> PagingRule:
    """Evict the page whose next use is furthest away: the best a rule can do, in a replay of a trace."""
    return Belady()
