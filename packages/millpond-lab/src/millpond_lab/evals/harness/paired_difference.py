"""Paired differences: two candidates on the same questions, with an interval over samples."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millpond.errors import DataError
from millpond_lab.evals.decoding.record import Record
from millpond_lab.evals.harness.summary import by_sample
from millpond_lab.evals.intervals import Floats, bootstrap, paired_interval

Verdict = Literal["holds", "no difference seen", "reversed"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean score of one candidate less that of another.

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


def difference(
    ours: Mapping[str, Sequence[Record]], theirs: Mapping[str, Sequence[Record]], seed: int, shares: bool = True
) -> Difference:
    """The difference on the tasks that name the records, each task with the same weight.

    Where a side has a sample's question several times, as at several budgets, their mean counts: records of one sample
    stay together.

    Args:
        shares: scores lie in 0 to 1 (see `paired_interval`); False where they have no bounds, as nats: then samples
            are resampled within each task, for both sides at once, from `seed`.

    Raises:
        DataError: the sides did not answer the same questions, or there are none.
    """
    if not ours or ours.keys() != theirs.keys():
        raise DataError(f"two sides of a comparison must have the same tasks, not {sorted(ours)} and {sorted(theirs)}")
    tasks = [_of_task(task, ours[task], theirs[task]) for task in ours]
    n = sum(len(weights) for _, weights in tasks)
    if shares:
        values = np.concatenate([sums / weights for sums, weights in tasks])
        parts = np.concatenate([weights / weights.sum() for _, weights in tasks])
        group = np.repeat(np.arange(len(tasks)), [len(weights) for _, weights in tasks])
        found = paired_interval(values, parts, group)
        return Difference(found.mean, found.low, found.high, n)
    seeds = [zlib.crc32(f"{seed} {task}".encode()) for task in ours]
    drawn = [bootstrap(sums, weights, own) for (sums, weights), own in zip(tasks, seeds, strict=True)]
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    mean = sum(float(sums.sum() / weights.sum()) for sums, weights in tasks) / len(tasks)
    return Difference(mean, float(low), float(high), n)


def _of_task(task: str, ours: Sequence[Record], theirs: Sequence[Record]) -> tuple[Floats, Floats]:
    """Sums of weight * difference, and of weights, by sample."""
    mine, other = by_sample(ours), by_sample(theirs)
    if not mine or {name: _asked(own) for name, own in mine.items()} != {k: _asked(v) for k, v in other.items()}:
        raise DataError(f"task {task!r}: the two sides of a comparison did not answer the same questions")
    sums = np.array([_total(mine[name]) - _total(other[name]) for name in mine])
    return sums, np.array([sum(record.weight for record in own) for own in mine.values()])


def _asked(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Questions and what they count for, however they are ordered."""
    return sorted((record.question, record.weight) for record in records)


def _total(records: Sequence[Record]) -> float:
    return sum(record.weight * record.score for record in records)
