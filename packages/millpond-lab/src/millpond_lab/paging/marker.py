"""Marker: pages used in this phase stay; of the others a random one is evicted (Fiat et al., 1991)."""

from __future__ import annotations

import random
from typing import Annotated

from millpond.cache.paging import paging_rule
from millpond.cache.paging.rule import PageFacts, PagingRule, RankedRule
from millpond.option_ranges import SEEDS

#: Bits of a rank below the phase.
WITHIN_PHASE = 33


class Marker(RankedRule):
    """Ranks pages by the phase of their last access, then at random.

    A page is marked when it is used. Where every page that may be evicted is marked, a phase ends: a new one begins
    with no marks. Misses are at most 2 H_k times the least possible on average, H_k = 1 + 1/2 + ... + 1/k for k pages.
    """

    name = "marker"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._phase = 1

    def rank(self, page: int, facts: PageFacts) -> int:
        """See `RankedRule`."""
        return self.marked()

    def marked(self) -> int:
        """Rank of a page that is used now: random among those of this phase, behind all others."""
        return self._phase << WITHIN_PHASE | self._random.getrandbits(WITHIN_PHASE - 1)

    def victim(self) -> int | None:
        """See `PagingRule`."""
        page = super().victim()
        if page is not None and self.rank_of(page) >> WITHIN_PHASE == self._phase:
            self._phase += 1
        return page


@paging_rule("marker")
def marker(seed: Annotated[int, "seed of the random choices", SEEDS] = 0) -> PagingRule:
    """Evict a random page of those that were not used in this phase; when all were, a new phase begins."""
    return Marker(seed)
