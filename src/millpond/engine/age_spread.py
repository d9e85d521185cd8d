"""Admission of requests whose caches grow: each counts with what it holds at its age, and they begin spread evenly.

Reserving the largest cache of every request leaves on average half of what answers add unused, because a request
holds it in its last step only. Where ages are spread evenly, memory holds the mean cache instead (the diagonal schedule
of FlexGen, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

#: Parts of an answer for each of which it is known how much of the cache is still to come.
PARTS = 8
#: Requests begin spread evenly only while this many times those that run together wait: beginning takes one answer's
#: length in which fewer run, and is worth it where several fillings follow.
FILLINGS = 4


class GrowingJob(Protocol):
    """What the admission knows of a job.

    Attributes:
        width: answers. new: most tokens of each. age: tokens that each has. reserved: most bytes of it from now on.
        later: bytes of an answer that are not held yet after each of `PARTS` equal parts of it; empty: all are.
        settled: its prompt is read, so that every step adds a token.
    """

    width: int
    new: int
    age: int
    later: tuple[int, ...]

    @property
    def reserved(self) -> int: ...

    @property
    def settled(self) -> bool: ...


class AgeSpread:
    """Decides when a job begins, by ages.

    Args:
        most_running: answers that run together.
    """

    def __init__(self, most_running: int) -> None:
        self._most_running = most_running
        self._credit = 0

    def next_step(self) -> None:
        """Each step, as many tokens as answers run together may be promised to jobs that begin."""
        self._credit = min(self._credit + self._most_running, self._most_running)

    def may_begin(self, waiting: int) -> bool:
        """Whether a job may begin while `waiting` answers have not begun."""
        return self._credit > 0 or waiting < FILLINGS * self._most_running

    def begins(self, job: GrowingJob) -> None:
        """A job begins, and is promised all its tokens."""
        self._credit -= job.new * job.width


def later_bytes(each: Callable[[int], int], new: int) -> tuple[int, ...]:
    """Bytes that an answer does not hold yet after each of `PARTS` parts of its `new` tokens.

    Args:
        each: most bytes of an answer of a number of tokens; does not fall as they grow.
    """
    most = each(new)
    return tuple(most - each(-(-new * part // PARTS)) for part in range(1, PARTS + 1))


def bytes_at(job: GrowingJob, age: int) -> int:
    """Most bytes that a job holds when each of its answers has `age` tokens."""
    if not job.later or job.new < 1:
        return job.reserved
    part = min(max(-(-age * PARTS // job.new), 1), PARTS)
    return job.reserved - job.later[part - 1] * job.width


def peak_bytes(jobs: Iterable[GrowingJob]) -> int:
    """Most bytes that running jobs hold together at any time, if every step adds a token to each.

    Between two ends the sum does not fall, so it is largest in the last step of one of them. A job whose prompt is
    still read counts with all that it may hold, since it is not known when it begins to answer.
    """
    whole, growing = 0, []
    for job in jobs:
        if job.settled:
            growing.append((max(job.new - job.age, 1), job))
        else:
            whole += job.reserved
    ends = {steps for steps, _ in growing}
    sums = (sum(bytes_at(job, job.age + end) for steps, job in growing if steps >= end) for end in ends)
    return whole + max(sums, default=0)
