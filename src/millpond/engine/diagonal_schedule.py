"""Admission of requests whose caches grow: each counts with what it holds at its age, and they start spread evenly.

Reserving the largest cache of every request leaves on average half of the bytes of answers unused, because a request
holds its largest cache in its last step only. Where ages are spread evenly, memory holds the mean cache instead (the
diagonal schedule of FlexGen, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millpond.engine.scheduler_request import SchedulerRequest

#: Parts of an answer for each of which it is known how much of the cache is still to come.
PARTS = 8
#: Requests start spread evenly only while this many times those that run together wait: the start takes one answer's
#: length in which fewer run, and is worth it where several fillings follow.
FILLINGS = 4


class DiagonalSchedule:
    """Start times of requests, by their ages.

    Args:
        max_running: Most answers that run together.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._credit = 0

    def next_step(self) -> None:
        """Promise as many tokens as answers run together to requests that begin in this step."""
        self._credit = min(self._credit + self._max_running, self._max_running)

    def can_start(self, waiting: int) -> bool:
        """Return whether a request may begin while `waiting` answers have not begun."""
        return self._credit > 0 or waiting < FILLINGS * self._max_running

    def record_start(self, request: SchedulerRequest) -> None:
        """Record that a request begins: all its tokens are promised."""
        self._credit -= request.max_new_tokens * request.num_answers


def growth_bytes(each: Callable[[int], int], max_new_tokens: int) -> tuple[int, ...]:
    """Return the bytes that an answer does not hold yet after each of `PARTS` parts of it.

    Args:
        each: Most bytes of an answer of a number of tokens; does not fall as they grow.
        max_new_tokens: Tokens of the answer.
    """
    max_bytes = each(max_new_tokens)
    return tuple(max_bytes - each(-(-max_new_tokens * part // PARTS)) for part in range(1, PARTS + 1))


def bytes_at(request: SchedulerRequest, num_decoded_tokens: int) -> int:
    """Return the most bytes of a request whose answers have `num_decoded_tokens` tokens each."""
    if not request.growth or request.max_new_tokens < 1:
        return request.reserved_bytes
    part = min(max(-(-num_decoded_tokens * PARTS // request.max_new_tokens), 1), PARTS)
    return request.reserved_bytes - request.growth[part - 1] * request.num_answers


def peak_bytes(requests: Iterable[SchedulerRequest]) -> int:
    """Return the most bytes of running requests together, if every step adds a token to each.

    Between two ends the sum does not fall, so it is largest in the last step of one of them. A request whose prompt is
    still being read counts with all that it may hold, since it is not known when it begins to answer.
    """
    prefill_bytes, growing = 0, []
    for request in requests:
        if request.is_prompt_done:
            growing.append((max(request.max_new_tokens - request.num_decoded_tokens, 1), request))
        else:
            prefill_bytes += request.reserved_bytes
    ends = {steps for steps, _ in growing}
    sums_at_ends = (
        sum(bytes_at(request, request.num_decoded_tokens + end) for steps, request in growing if steps >= end)
        for end in ends
    )
    return prefill_bytes + max(sums_at_ends, default=0)
