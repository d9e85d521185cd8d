"""MARK&PREDICT: Marker, of unmarked pages first those that are predicted to be useless (arXiv:2210.02775)."""

from __future__ import annotations

from typing import Annotated

from millpond.cache.paging import paging_rule
from millpond.cache.paging.predictor import PredictedBits
from millpond.cache.paging.rule import PageFacts, PagingRule
from millpond.option_files import FILE
from millpond.option_ranges import SEEDS
from millpond_lab.paging.marker import WITHIN_PHASE, Marker


class MarkAndPredict(Marker):
    """Marker, with the bit of a page before the random number.

    The paper's bit says that a page is not used in the next phase: misses are then at most 2 times the least possible,
    plus H_k for each wrong 0 and one for each wrong 1, and O(log k) whatever the bits (Theorem 2).

    Departs from the paper: outside a replay the bits are those of `mark0`, which say whether Belady's rule evicts the
    page before its next use.
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
    return MarkAndPredict(PredictedBits.of_file(pager), seed)
