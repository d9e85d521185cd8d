"""What a claim of a paper is here, and how a verdict follows from rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: KL in nats a token that counts as no loss: a hundredth of the perplexity.
NO_LOSS = 0.01
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
