"""Marker (Fiat et al., 1991), and MARK0 and MARK&PREDICT, which use predictions (arXiv:2210.02775)."""

from __future__ import annotations

import random
from typing import Annotated

from millpond.cache.paging import paging_rule
from millpond.cache.paging.predictor import PredictedBits
from millpond.cache.paging.rule import PageFacts, PagingRule, RankedRule
from millpond.option_files import FILE
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


class MarkAndPredict(Marker):
    """Marker, with the bit of a page before the random number.

    The paper's bit says that a page is not used in the next phase: misses are then at most 2 times the least possible,
    plus H_k for each wrong 0 and one for each wrong 1, and O(log k) whatever the bits (Theorem 2).

    Departs from the paper: the bits of the package's predictor are those of `mark0`, which say whether Belady's rule
    evicts the page before its next use. `millpond train pager --label phase` makes a predictor of the paper's bits,
    which is not refitted while pages come and go.
    """

    name = "mark_predict"

    def __init__(self, bits: PredictedBits, seed: int) -> None:
        super().__init__(seed)
        self._bits = bits

    def rank(self, page: int, facts: PageFacts) -> int:
        """See `RankedRule`."""
        return self.marked() | (not self._bits.bit(facts)) << WITHIN_PHASE - 1

    def victim(self) -> int | None:
        """See `PagingRule`."""
        self._bits.pages = self.n_pages
        return super().victim()


@paging_rule("mark_predict", paper="arXiv:2210.02775")
def mark_predict(
    pager: Annotated[str, "file of a predictor (millpond train pager); empty: the one of the package", FILE] = "",
    seed: Annotated[int, "seed of the random choices", SEEDS] = 0,
) -> PagingRule:
    """Evict as `marker`, of the pages not used in this phase first those that are predicted to be useless."""
    return MarkAndPredict(PredictedBits.of_file(pager, ("belady", "phase")), seed)
