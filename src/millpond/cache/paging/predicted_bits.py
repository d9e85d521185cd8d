"""Discard bits of the pages of a cache: a predictor, and what it needs to know of each page's past."""

from __future__ import annotations

from array import array
from functools import cache
from pathlib import Path


from millpond.cache.paging.features import gap_step, steps_of
from millpond.cache.paging.predictor import DiscardPredictor, Weights, load_weights
from millpond.cache.paging.rule import PageFacts

#: Log odds above which a page counts as safe to discard: a probability of 0.65.
THRESHOLD = 0.62
_SHIPPED = Path(__file__).parent / "pager.safetensors"


class PredictedBits:
    """Bits of accesses: those that come with the facts, otherwise those of the predictor.

    Keeps 7 bytes for each page: the time of its last access, the gap before, and its number of accesses.

    Attributes:
        pages: of the cache, for labels; None: not known yet.
    """

    def __init__(self, predictor: DiscardPredictor) -> None:
        self.predictor = predictor
        self.pages: int | None = None
        self._last = array("I")
        self._gaps = bytearray()
        self._accesses = bytearray()
        self._request = -1

    @classmethod
    def of_file(cls, file: str) -> PredictedBits:
        """With the weights of a file, or with those of the package.

        Raises:
            DataError: the file cannot be read, or holds other weights.
        """
        return cls(DiscardPredictor(load_weights(Path(file)) if file else shipped_weights()))

    def bit(self, page: int, facts: PageFacts) -> bool:
        """Whether a page that is used now is safe to discard afterwards."""
        while page >= len(self._last):
            self._last.append(0)
            self._gaps.append(0)
            self._accesses.append(0)
        predictor = self.predictor
        if facts.request != self._request:
            self._request = facts.request
            predictor.fit()
        accesses, now = self._accesses[page], predictor.clock
        last = gap = None
        if accesses:
            last = now - ((now - self._last[page]) & 0xFFFFFFFF)
            gap = gap_step(now - last)
        steps = steps_of(facts, accesses, gap or 0, self._gaps[page])
        predictor.seen(steps, last, self.pages)
        self._last[page] = now & 0xFFFFFFFF
        self._gaps[page] = gap or 0
        self._accesses[page] = min(accesses + 1, 255)
        return predictor.log_odds(steps) > THRESHOLD if facts.bit is None else facts.bit

    def last_access(self, page: int) -> int:
        """Time since the last access of a page, as a number that is the lower the longer ago that was."""
        return -((self.predictor.clock - self._last[page]) & 0xFFFFFFFF)

    def forget(self, page: int) -> None:
        """A page is gone, and its past with it."""
        if page < len(self._accesses):
            self._accesses[page] = self._gaps[page] = 0


@cache
def shipped_weights() -> Weights:
    """The weights that come with the package."""
    return load_weights(_SHIPPED)
