"""Fit of a predictor of discard bits to a trace: what the best rule did, at several sizes of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.cache.paging.page_directory import LRUDirectory
from millpond.cache.paging.predictor import (
    N_FEATURES,
    N_WEIGHTS,
    WINDOW,
    AccessHistory,
    Label,
    Weights,
    log_odds_of,
    slope,
    steps_of,
)
from millpond.cache.paging.rule import PageFacts
from millpond.errors import DataError
from millpond_lab.paging.replay import Belady, Path, belady_bits, next_uses_of, phase_bits, replay

#: Sizes of the cache, as shares of the distinct pages of a trace.
SHARES = (0.01, 0.03, 0.1)
#: Fewest accesses of a trace.
_FEWEST = 1000
#: Passes over all accesses (AdaGrad), and the rate.
_PASSES, _RATE = 300, 0.5
#: Pull of each weight to 0, per access.
_DECAY = 1e-4


@dataclass(frozen=True, slots=True)
class FittedPager:
    """Weights, and how well they predict the accesses that they were fitted to.

    Attributes:
        accesses: rows, one for each access and size. discards: share that the best rule discards. correct: share that
            the weights predict right at even odds.
    """

    weights: Weights
    accesses: int
    discards: float
    correct: float


def fit_pager(
    traces: Sequence[Sequence[Path]], shares: Sequence[float] = SHARES, label: Label = "belady"
) -> FittedPager:
    """Weights for the decisions of Belady's rule, or for the phases, of these traces together, each at each size.

    Args:
        traces: requests of each, as keys of pages.
        shares: sizes of the cache over the distinct pages of a trace.
        label: what a bit says of a page: that Belady's rule evicts it before its next use, or that the next phase
            does not use it.

    Raises:
        DataError: fewer than 1,000 accesses in all.
    """
    if sum(len(path) for requests in traces for path in requests) < _FEWEST:
        raise DataError(f"the traces have fewer than {_FEWEST:,} accesses to full pages; give longer ones")
    rows = [_labelled(requests, share, label) for requests in traces for share in shares]
    steps, discards = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    weights, squares = np.zeros(N_WEIGHTS), np.full(N_WEIGHTS, 1e-6)
    for _ in range(_PASSES):
        gradient = slope(weights, steps, discards) + _DECAY * weights
        squares += gradient**2
        weights -= _RATE * gradient / np.sqrt(squares)
    correct = (log_odds_of(weights, steps) > 0) == (discards > 0)
    return FittedPager(weights.astype(np.float32), len(steps), float(discards.mean()), float(correct.mean()))


def _labelled(
    requests: Sequence[Path], share: float, label: Label
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Features of each access, (accesses, N_FEATURES), and whether its page is useless afterwards."""
    pages = max(int(share * len({key for path in requests for key in path})), 1)
    useless = phase_bits(requests, pages) if label == "phase" else _discarded(requests, pages)
    steps = np.zeros((len(useless), N_FEATURES), np.uint8)
    history, held, numbers, at = AccessHistory(WINDOW), LRUDirectory(), dict[int, int](), 0
    for number, path in enumerate(requests):
        known = next((d for d, key in enumerate(path) if key not in numbers or numbers[key] not in held), len(path))
        parent = -1
        for depth, key in enumerate(path):
            if key not in numbers:
                numbers[key] = len(numbers)
                held.grow()
            past = history.access(key)
            facts = PageFacts(key, parent, number, depth, len(path), known)
            steps[at] = steps_of(facts, past.accesses, past.gap, past.gap_before)
            held.touch(numbers[key], parent)
            if len(held) > pages:
                held.evict()
            parent, at = numbers[key], at + 1
    return steps, np.asarray(useless, np.float32)


def _discarded(requests: Sequence[Path], pages: int) -> list[bool]:
    """Whether Belady's rule evicts the page of each access before its next use, or there is none."""
    next_uses = next_uses_of(requests)
    best = replay(requests, Belady(), pages, next_uses=next_uses)
    labels = belady_bits(requests, best.evicted, best.evicted_at)
    return [bit or use is None for bit, use in zip(labels, next_uses, strict=True)]
