"""OverScore: a score made of another one, which looks at what the other looks at."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.kernels.rules import Signal
from millpond.policy.score import Queries, Score


@dataclass(frozen=True, slots=True)
class OverScore:
    """What a score over `base` asks the cache for: the same as `base`."""

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
