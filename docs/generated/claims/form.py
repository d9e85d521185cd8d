"""What a claim of a paper is here, and how a verdict follows from rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond_lab.evals.harness.summary import Interval, resampled_interval

#: Of the bootstrap over windows.
SEED = 7
#: KL in nats a token that counts as no loss: a hundredth of the perplexity.
NO_LOSS = 0.01
#: Of what the full cache finds, the share that counts as all.
ALL = 0.95
REPRODUCED, PARTLY, CONTRADICTED, UNSEEN = "reproduced", "partly", "contradicted", "no difference seen"


@dataclass(frozen=True, slots=True)
class Tried:
    """What came out: the figure with its interval, the bytes, the model, the rows and their script, and the verdict."""

    figure: str
    bytes: str
    model: str
    rows: str
    script: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper, and how it was tried; `tried` is the command that tries it where nothing has been run."""

    paper: str
    says: str
    tried: Callable[[], Tried] | str


def verdict(low: float, high: float, wanted: float) -> str:
    """Of a figure that should be above 0, and that the paper has as `wanted`.

    Example:
        >>> verdict(2.0, 3.0, 1.9), verdict(0.5, 3.0, 1.9), verdict(-1.0, 1.0, 1.9), verdict(-2.0, -1.0, 1.9)
        ('reproduced', 'partly', 'no difference seen', 'contradicted')
    """
    if high < 0:
        return CONTRADICTED
    if low <= 0:
        return UNSEEN
    return REPRODUCED if low >= wanted else PARTLY


def of_all(verdicts: Sequence[str]) -> str:
    """One verdict of several pairs.

    Example:
        >>> of_all(["reproduced", "no difference seen"]), of_all(["contradicted", "no difference seen"])
        ('partly', 'contradicted')
    """
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return PARTLY if {REPRODUCED, PARTLY} & {*verdicts} else CONTRADICTED


def over_windows(values: Sequence[float]) -> Interval:
    """The mean of what windows gave, with its 95 % interval."""
    return resampled_interval(np.array(values, float), np.ones(len(values)), SEED)


def figure(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the least and the largest."""
    return f"{np.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def shown(found: Interval) -> str:
    """A mean of nats with its interval."""
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def within(found: Interval, most: float) -> str:
    """Of a loss that the paper has as at most so much.

    Example:
        >>> [within(Interval(0.01, *ends), 0.01) for ends in ((0.0, 0.01), (0.011, 0.02), (0.005, 0.02))]
        ['reproduced', 'contradicted', 'no difference seen']
    """
    return REPRODUCED if found.high <= most else CONTRADICTED if found.low > most else UNSEEN


def ahead(less: Sequence[float], more: Sequence[float]) -> Interval:
    """By how much the losses `less` are below `more`, window by window."""
    return over_windows([theirs - own for own, theirs in zip(less, more, strict=True)])


def found_share(row: Mapping[str, Any]) -> str:
    """The score of a row of answers with its interval."""
    score = row["score"]
    return f"{score['mean']:.2f} ({score['low']:.2f} to {score['high']:.2f})"
