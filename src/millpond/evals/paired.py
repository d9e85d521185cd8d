"""Paired differences: two contenders on the same questions, with a bootstrap over samples."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millpond.errors import DataError
from millpond.evals.record import Record
from millpond.evals.summary import bootstrap, by_sample

Verdict = Literal["holds", "no difference seen", "reversed"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean score of one contender less that of another.

    Attributes:
        mean: over tasks of the mean over questions. low, high: its 95 % interval. n: samples.
    """

    mean: float
    low: float
    high: float
    n: int

    @property
    def verdict(self) -> Verdict:
        """Whether the first is better, as far as these samples can tell."""
        return "holds" if self.low > 0 else "reversed" if self.high < 0 else "no difference seen"


def difference(ours: Mapping[str, Sequence[Record]], theirs: Mapping[str, Sequence[Record]], seed: int) -> Difference:
    """The difference on the tasks that name the records. Samples are resampled within each task, for both at once.

    Where a side has a sample's question several times, as at several budgets, their sum counts: records of one sample
    stay together.

    Raises:
        DataError: the sides did not answer the same questions, or there are none.
    """
    if not ours or ours.keys() != theirs.keys():
        raise DataError(f"two sides of a comparison must have the same tasks, not {sorted(ours)} and {sorted(theirs)}")
    means, resampled, n = [], [], 0
    for task in ours:
        mine, other = by_sample(ours[task]), by_sample(theirs[task])
        if not mine or {name: _asked(own) for name, own in mine.items()} != {k: _asked(v) for k, v in other.items()}:
            raise DataError(f"task {task!r}: the two sides of a comparison did not answer the same questions")
        sums = np.array([_total(mine[name]) - _total(other[name]) for name in mine])
        weights = np.array([sum(record.weight for record in own) for own in mine.values()])
        means.append(float(sums.sum() / weights.sum()))
        resampled.append(bootstrap(sums, weights, zlib.crc32(f"{seed} {task}".encode())))
        n += len(mine)
    low, high = np.percentile(np.mean(resampled, axis=0), [2.5, 97.5])
    return Difference(sum(means) / len(means), float(low), float(high), n)


def _asked(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Questions and what they count for, however they are ordered."""
    return sorted((record.question, record.weight) for record in records)


def _total(records: Sequence[Record]) -> float:
    return sum(record.weight * record.score for record in records)
