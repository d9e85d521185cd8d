"""Requests of a simulation: when they arrive and how long prompts and answers are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millpond.errors import OptionError


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        at: seconds from the first one. prompt, output: tokens, at least 1 each.
    """

    at: float
    prompt: int
    output: int


def sample(lengths: Sequence[tuple[int, int]], count: int, rate: float, seed: int) -> list[PlannedRequest]:
    """`count` of the given lengths without repetition, arriving independently at `rate` per second.

    The lengths and the gaps of a seed are those of DistServe's simulator (`random.sample` and exponential gaps of
    NumPy's older generator; the first request comes at 0), so that its table can be checked.

    Args:
        lengths: (prompt, output) tokens of a trace.

    Raises:
        OptionError: fewer lengths than requests, or a rate that is not above 0.
    """
    if not 0 < count <= len(lengths):
        raise OptionError(f"{count} requests: the trace has {len(lengths):,} usable ones; ask for 1 to as many")
    if not 0 < rate < float("inf"):
        raise OptionError(f"rate={rate:g} requests per second must be above 0")
    chosen = random.Random(seed).sample(list(lengths), count)
    gaps = np.random.RandomState(seed).gamma(1.0, 1 / rate, size=count - 1)
    times = [0.0, *np.cumsum(gaps).tolist()]
    return [PlannedRequest(at, prompt, output) for at, (prompt, output) in zip(times, chosen, strict=True)]
