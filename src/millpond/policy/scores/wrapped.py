"""Wraps another score and needs the same signals."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.kernels.decode_rules import Signal
from millpond.policy.scores.attention import AccumulatedAttention, Queries, Score


@dataclass(frozen=True, slots=True)
class WrappedScore:
    """A score over `base`, with the same needs as `base`."""

    base: Score

    @property
    def queries(self) -> Queries:
        return self.base.queries

    @property
    def window(self) -> int:
        return self.base.window

    @property
    def signal(self) -> Signal:
        return self.base.signal


def decay_of(score: object) -> float:
    """The factor on all gathered attention at each new token: that of the innermost score; 1 where none forgets."""
    while isinstance(score, WrappedScore):
        score = score.base
    return score.decay if isinstance(score, AccumulatedAttention) else 1.0
