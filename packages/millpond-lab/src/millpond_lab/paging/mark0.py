"""MARK0: pages that are predicted to be safe to discard are evicted first, the others by Marker (arXiv:2210.02775)."""

from __future__ import annotations

from typing import Annotated

from millpond.cache.paging import paging_rule
from millpond.cache.paging.predictor import PredictedBits
from millpond.cache.paging.rule import PageFacts, PagingRule
from millpond.option_files import FILE
from millpond.option_ranges import SEEDS
from millpond_lab.paging.marker import WITHIN_PHASE, Marker

#: A larger excess counts as this one.
_MOST_EXCESS = 255


class Mark0(Marker):
    """Marker for pages of bit 0; those of bit 1 go first.

    With the bits of Belady's rule (1: it evicts the page before its next use) misses are Belady's. Where no page
    follows another, each wrong 0 costs at most 2 H_k misses on average and each wrong 1 costs one (Theorem 1).

    Departs from the paper where pages follow others: one wrong 0 would keep all pages before it. A page is evicted
    before those that it follows, so that the right bits of a request are 0s and then 1s. A 0 behind an excess of 1s
    counts as 1: the excess is that of the pages before it in the request, from the place where it is largest.
    """

    name = "mark0"

    def __init__(self, bits: PredictedBits, seed: int) -> None:
        super().__init__(seed)
        self._bits = bits
        self._excess = bytearray()  # by page: of 1s over 0s in its request up to it, from where that is largest

    def rank(self, page: int, facts: PageFacts) -> int:
        """See `RankedRule`."""
        rank = self.marked()
        return rank & (1 << WITHIN_PHASE) - 1 if self._discards(page, facts) else rank  # phase 0: before all others

    def victim(self) -> int | None:
        """See `PagingRule`."""
        self._bits.pages = self.n_pages
        return super().victim()

    def _discards(self, page: int, facts: PageFacts) -> bool:
        bit = self._bits.bit(facts)
        before = self._excess[facts.parent] if facts.parent >= 0 else 0
        while page >= len(self._excess):
            self._excess.append(0)
        self._excess[page] = min(before + 1, _MOST_EXCESS) if bit else max(before - 1, 0)
        return bit or before > 0


@paging_rule("mark0", paper="arXiv:2210.02775")
def mark0(
    pager: Annotated[str, "file of a predictor (millpond train pager); empty: the one of the package", FILE] = "",
    seed: Annotated[int, "seed of the random choices", SEEDS] = 0,
) -> PagingRule:
    """Evict the pages that are predicted to be evicted by the best rule anyway, then as `marker`."""
    return Mark0(PredictedBits.of_file(pager), seed)
