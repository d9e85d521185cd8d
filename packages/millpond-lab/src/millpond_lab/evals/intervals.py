"""95 % intervals of means over samples. Where scores lie in 0 to 1, equal ones are no certainty: 200 of 200 right
answers leave room for a few wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
#: Numbers drawn at once, 32 MB.
_AT_ONCE = 4_000_000
#: The normal distribution's 97.5 % point.
Z = 1.959963984540054

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval; NaN where there is nothing to take the mean of."""

    mean: float
    low: float
    high: float


NOTHING = Interval(math.nan, math.nan, math.nan)


def share_interval(scores: Floats, weights: Floats | None = None) -> Interval:
    """Of a mean of scores in 0 to 1, (n,), one for each independent sample: Wilson's score interval.

    For right and wrong answers it is exactly Wilson's (1927). Scores in between (shares of an answer, means over the
    questions of a sample) count as the number of right or wrong answers that has the same variance; it is computed with
    z^2 / 2 right and as many wrong answers added, as in Wilson's centre, so that it is never 0.
    """
    if weights is None:
        weights = np.ones(len(scores))
    if not weights.any():
        return NOTHING
    mean, n, variance = _moments(scores, weights, np.zeros(len(scores), int))
    half = Z * Z / 2
    centre = (n * mean + half) / (n + 2 * half)
    spread = n * (variance + (mean - centre) ** 2) + half * (centre**2 + (1 - centre) ** 2)
    return wilson(mean, n * centre * (1 - centre) * (n + 2 * half) / spread)


def wilson(share: float, n: float) -> Interval:
    """Wilson's score interval of a share of n independent answers."""
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + (Z / (2 * n)) ** 2)
    # at 0 and 1 the formula's ends are these, but for rounding
    return Interval(share, min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share))


def paired_interval(
    differences: Floats, weights: Floats | None = None, groups: npt.NDArray[np.int_] | None = None
) -> Interval:
    """Of a mean of differences in -1 to 1, (n,), one for each independent sample that both sides have answered.

    Bonett and Price's (2012) adjusted Wald interval of paired proportions, which adds a pair that only the first side
    has right and one that only the other has. Where differences may be smaller than 1 (shares of an answer, means over
    several questions), the pairs added differ by as much as those that differ do on average; by 1 where none does.

    Args:
        weights: (n,) what each counts for; groups: (n,) samples whose difference is drawn around the same mean, as
            those of one task: what tasks differ by is no chance.
    """
    weights = np.ones(len(differences)) if weights is None else weights
    if not weights.any():
        return NOTHING
    groups = np.zeros(len(differences), int) if groups is None else groups
    mean, n, variance = _moments(differences, weights, groups)
    apart = np.abs(differences[differences != 0])
    added = float(apart.mean()) if len(apart) else 1.0
    centre = mean * n / (n + 2)
    spread = (n * (variance + (mean - centre) ** 2) + (added - centre) ** 2 + (added + centre) ** 2) / (n + 2)
    half = Z * math.sqrt(spread / (n + 2))
    return Interval(mean, max(centre - half, -1.0), min(centre + half, 1.0))


def resampled_interval(
    sums: Floats, weights: Floats, seed: int, scale: Callable[[Floats], Floats] = np.positive
) -> Interval:
    """Of a mean of numbers without bounds: the percentiles of its bootstrap, see `bootstrap`."""
    if not weights.any():
        return NOTHING
    means = bootstrap(sums, weights, seed)
    low, high = np.percentile(means[~np.isnan(means)], [2.5, 97.5])
    return Interval(*map(float, scale(np.array([sums.sum() / weights.sum(), low, high]))))


def bootstrap(sums: Floats, weights: Floats, seed: int, resamples: int = RESAMPLES) -> Floats:
    """Weighted means of resampled samples, (resamples,): sums (n,) of weight * score, weights (n,); NaN where 0 / 0.

    Each resample draws n samples with replacement. The same seed gives the same numbers.
    """
    rng, n = np.random.default_rng(seed), len(sums)
    rows = max(1, _AT_ONCE // n)
    parts = []
    for begin in range(0, resamples, rows):
        drawn = rng.integers(0, n, (min(rows, resamples - begin), n))
        parts.append(_ratio(sums[drawn].sum(1), weights[drawn].sum(1)))
    return np.concatenate(parts)


def _moments(values: Floats, weights: Floats, groups: npt.NDArray[np.int_]) -> tuple[float, float, float]:
    """The weighted mean, how many equally weighted samples it is worth, and the variance of one around its group's."""
    own = (np.bincount(groups, weights * values) / np.bincount(groups, weights))[groups]
    squares = weights**2
    n = weights.sum() ** 2 / squares.sum()
    return float(np.average(values, weights=weights)), float(n), float(np.average((values - own) ** 2, weights=squares))


def _ratio(sums: Floats, weights: Floats) -> Floats:
    ratio: Floats = np.divide(sums, weights, out=np.full(len(sums), math.nan), where=weights != 0)
    return ratio
