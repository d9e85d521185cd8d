"""Admission of requests whose caches grow: each counts with what it holds at its age, and they begin spread evenly.

Reserving the largest cache of every request leaves on average half of what answers add unused, because a request
holds it in its last step only. Where ages are spread evenly, memory holds the mean cache instead (the diagonal schedule
of FlexGen, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millpond.engine.scheduler_request import SchedulerRequest

#: Parts of an answer for each of which it is known how much of the cache is still to come.
PARTS = 8
#: Requests begin spread evenly only while this many times those that run together wait: beginning takes one answer's
#: length in which fewer run, and is worth it where several fillings follow.
FILLINGS = 4


class DiagonalSchedule:
    """Decides when a request begins, by ages.

    Args:
        most_running: answers that run together.
    """

    def __init__(self, most_running: int) -> None:
        self._most_running = most_running
        self._credit = 0

    def next_step(self) -> None:
        """Each step, as many tokens as answers run together may be promised to requests that begin."""
        self._credit = min(self._credit + self._most_running, self._most_running)

    def can_start(self, waiting: int) -> bool:
        """Whether a request may begin while `waiting` answers have not begun."""
        return self._credit > 0 or waiting < FILLINGS * self._most_running

    def record_start(self, request: SchedulerRequest) -> None:
        """A request begins, and is promised all its tokens."""
        self._credit -= request.max_new_tokens * request.num_answers


def growth_bytes(each: Callable[[int], int], max_new_tokens: int) -> tuple[int, ...]:
    """Bytes that an answer does not hold yet after each of `PARTS` parts of its `max_new_tokens` tokens.

    Args:
        each: most bytes of an answer of a number of tokens; does not fall as they grow.
    """
    most = each(max_new_tokens)
    return tuple(most - each(-(-max_new_tokens * part // PARTS)) for part in range(1, PARTS + 1))


def bytes_at(request: SchedulerRequest, num_decoded_tokens: int) -> int:
    """Most bytes that a request holds when each of its answers has `num_decoded_tokens` tokens."""
    if not request.growth or request.max_new_tokens < 1:
        return request.reserved_bytes
    part = min(max(-(-num_decoded_tokens * PARTS // request.max_new_tokens), 1), PARTS)
    return request.reserved_bytes - request.growth[part - 1] * request.num_answers


def peak_bytes(requests: Iterable[SchedulerRequest]) -> int:
    """Most bytes that running requests hold together at any time, if every step adds a token to each.

    Between two ends the sum does not fall, so it is largest in the last step of one of them. A request whose prompt is
    still read counts with all that it may hold, since it is not known when it begins to answer.
    """
    whole, growing = 0, []
    for request in requests:
        if request.is_prompt_done:
            growing.append((max(request.max_new_tokens - request.num_decoded_tokens, 1), request))
        else:
            whole += request.reserved_bytes
    ends = {steps for steps, _ in growing}
    sums = (
        sum(bytes_at(request, request.num_decoded_tokens + end) for steps, request in growing if steps >= end)
        for end in ends
    )
    return whole + max(sums, default=0)
