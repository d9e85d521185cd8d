"""Discard bits of the pages of a cache: a predictor, and the past of each page that it needs to know."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from millpond.cache.paging.access_history import AccessHistory
from millpond.cache.paging.features import steps_of
from millpond.cache.paging.predictor import WINDOW, DiscardPredictor, Weights, load_weights
from millpond.cache.paging.rule import PageFacts

#: Log odds above which a page counts as safe to discard, a probability of 0.75: see docs/how-to/prefix-cache.md.
THRESHOLD = 1.0986
_SHIPPED = Path(__file__).parent / "pager.safetensors"


class PredictedBits:
    """Bits of accesses: those that come with the facts, otherwise those of the predictor.

    Attributes:
        pages: of the cache, for labels; None: not known yet.
    """

    def __init__(self, predictor: DiscardPredictor) -> None:
        self._predictor = predictor
        self._history = AccessHistory(WINDOW)
        self._request = -1
        self.pages: int | None = None

    @classmethod
    def of_file(cls, file: str) -> PredictedBits:
        """With the weights of a file, or with those of the package.

        Raises:
            DataError: the file cannot be read, or holds other weights.
        """
        return cls(DiscardPredictor(load_weights(Path(file)) if file else shipped_weights()))

    def bit(self, facts: PageFacts) -> bool:
        """Whether a page that is used now is safe to discard afterwards."""
        if facts.bit is not None:
            return facts.bit
        if facts.request != self._request:
            self._request = facts.request
            self._predictor.fit()
        now = self._history.clock
        past = self._history.access(facts.key)
        steps = steps_of(facts, past.accesses, past.gap, past.gap_before)
        self._predictor.seen(now, steps, past.last, self.pages)
        return self._predictor.log_odds(steps) > THRESHOLD


@cache
def shipped_weights() -> Weights:
    """The weights that come with the package."""
    return load_weights(_SHIPPED)
