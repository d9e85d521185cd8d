"""Scores from attention: a number per entry, higher is kept, with its signal and its rule for decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Signal, hash_priority
from millpond.kernels.merge.reference import blend
from millpond.policy.view import View

#: What a score wants of the queries at prefill: nothing; the attention of every one, of the last `window`, or of both
#: kinds; or no attention, but mean and spread of them all (`QueryMoments`), as the layer uses them or before RoPE.
Queries = Literal["none", "all", "window", "both", "rotated", "unrotated"]


class Score(Protocol):
    """Score at prefill, with the signal and eviction order that continue it while decoding."""

    @property
    def queries(self) -> Queries: ...
    @property
    def window(self) -> int: ...
    @property
    def signal(self) -> Signal: ...
    @property
    def evict(self) -> Evict | None:
        """Eviction order of the decode kernel; None if each step must end with a plan (slow)."""
        ...

    def score(self, view: View, seed: int) -> Tensor:
        """Return (H, N) float32; the value where there is no entry does not matter."""
        ...


def _signal(view: View) -> Tensor:
    assert view.signal is not None, "the cache provides the signal that a score declares"
    return view.signal


@dataclass(frozen=True, slots=True)
class AccumulatedAttention:
    """s_j = sum_i A_ij over every query i since entry j was written (H2O, Algorithm 2).

    With `average` the sum is divided by the number of those queries, so that old entries have no head start. With a
    `decay` below 1 each new query makes all before it count less: s_j = sum_i decay**(n - i) A_ij at query n (A2SF,
    Jo and Shin, arXiv:2407.20485).
    """

    average: bool = False
    decay: float = 1.0
    queries: Queries = "all"
    window: int = 0
    signal: Signal = Signal.SUM

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise OptionError(f"decay={self.decay:g} must lie in (0, 1]; 1 forgets nothing")
        if self.average and self.decay != 1:
            raise OptionError(
                f"average=true weighs all queries alike and decay={self.decay:g} does not; choose one of them"
            )

    @property
    def evict(self) -> Evict:
        return Evict.ACC_MEAN if self.average else Evict.ACC

    def score(self, view: View, seed: int) -> Tensor:
        if not self.average:
            return _signal(view)
        return _signal(view) / (view.seen - view.positions).clamp(min=1)


@dataclass(frozen=True, slots=True)
class LeastAttention:
    """s_j = - sum_i A_ij: the entries that have gathered most attention leave first."""

    queries: Queries = "all"
    window: int = 0
    signal: Signal = Signal.SUM
    evict: Evict = Evict.HEAVIEST

    def score(self, view: View, seed: int) -> Tensor:
        return -_signal(view)


@dataclass(frozen=True, slots=True)
class LastAttention:
    """s_j = A_tj of the newest query t alone (TOVA)."""

    queries: Queries = "window"
    window: int = 1
    signal: Signal = Signal.LAST
    evict: Evict = Evict.ACC

    def score(self, view: View, seed: int) -> Tensor:
        return _signal(view)


@dataclass(frozen=True, slots=True)
class WindowAttention:
    """Mean attention of the last `window` queries, pooled over neighbours (SnapKV).

    c_j = mean_i A_ij over the window's queries i, then a one-dimensional max or average pool of width `kernel` over
    the entries before the window, in the order of positions. Average pooling counts the zero padding.
    """

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg", "none"] = "max"
    queries: Queries = "window"
    signal: Signal = Signal.SUM
    evict: Evict = Evict.ACC

    def score(self, view: View, seed: int) -> Tensor:
        mean = _signal(view) / self.window
        before = view.before_window(self.window)
        if self.pool == "none" or self.kernel == 1:
            return mean
        fill = float("-inf") if self.pool == "max" else 0.0
        values = torch.where(before, mean, fill)[None]
        pad = self.kernel // 2
        if self.pool == "max":
            pooled = F.max_pool1d(values, self.kernel, stride=1, padding=pad)[0]
        else:
            pooled = F.avg_pool1d(values, self.kernel, stride=1, padding=pad)[0]
        return torch.where(before, pooled, mean)


@dataclass(frozen=True, slots=True)
class Recency:
    """s_j = position of j: the newest stay."""

    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict = Evict.OLDEST

    def score(self, view: View, seed: int) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True, slots=True)
class RandomPriority:
    """s_j = a hash of (seed, layer, head, position).

    The sample is uniform, and no batch, chunk or order changes it.
    """

    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict = Evict.RANDOM

    def score(self, view: View, seed: int) -> Tensor:
        return hash_priority(seed, view.heads, view.positions)


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


#: Scores of which a region's entries alone decide, by positions and the signal: many layers are scored at once.
_BY_REGION = (AccumulatedAttention, LeastAttention, LastAttention, WindowAttention, Recency)


def is_by_region(score: object) -> bool:
    """Whether a score reads but `positions`, `signal` and `seen`, of each region alone."""
    return type(score) in _BY_REGION


def innermost(score: object) -> object:
    """Return the score that `score` is or builds on."""
    while isinstance(score, WrappedScore):
        score = score.base
    return score


def with_innermost(score: Any, new: Any) -> Any:
    """Return `score` over another innermost score."""
    return replace(score, base=with_innermost(score.base, new)) if isinstance(score, WrappedScore) else new


def decay_of(score: object) -> float:
    """Return the factor on all recorded attention at each new token.

    It is that of the innermost score; 1 where none forgets.
    """
    score = innermost(score)
    return score.decay if isinstance(score, AccumulatedAttention) else 1.0


@dataclass(frozen=True, slots=True)
class GlobalAndLocal:
    """s_j = max(g_j, l_j * mean(g) / mean(l)), max-pooled over `kernel` neighbours.

    g is the attention from all queries, l that of the last `window`. Over a whole prompt of n tokens the factor is
    n / window exactly.
    """

    window: int = 32
    kernel: int = 1
    queries: Queries = "both"
    signal: Signal = Signal.SUM
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache provides the signal that a score declares"
        overall, local = (x.masked_fill(~view.valid, 0) for x in (view.signal, view.window_signal))
        best = blend(overall, local)
        if self.kernel == 1:
            return best
        return F.max_pool1d(best[None], self.kernel, stride=1, padding=self.kernel // 2)[0]
