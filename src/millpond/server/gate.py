"""Gate: who may come in. It counts what is under way, refuses what would wait too long, and empties the house."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millpond.server.errors import ApiError
from millpond.server.llm import ServedLLM

#: Seconds that a refused client is asked to wait, at least and at most.
_LEAST_WAIT, _MOST_WAIT = 1, 60


class Gate:
    """In front of the engine.

    Attributes:
        under_way: ids of the prompts that came in and are not answered. draining: nobody comes in any more.
    """

    def __init__(self, llm: ServedLLM, max_queue: int) -> None:
        self.under_way: set[str] = set()
        self.draining = False
        self._llm = llm
        self._max_queue = max_queue
        self._ends: deque[float] = deque(maxlen=32)

    @contextmanager
    def enter(self, ids: Sequence[str]) -> Iterator[None]:
        """Come in with some prompts, all or none of them.

        Raises:
            ApiError: 503, the server is going down; 429, too many wait already; 400, so many prompts never fit.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", "shutting_down", headers=_after(_LEAST_WAIT))
        self.check_number(len(ids))
        waiting = self.waiting
        if waiting + len(ids) > self._max_queue:
            wait = self._wait_s(waiting)
            message = f"{waiting} prompts wait and the queue holds {self._max_queue}; try again in {wait} s"
            raise ApiError(429, message, "queue_full", headers=_after(wait))
        self.under_way.update(ids)
        try:
            yield
        finally:
            self.under_way.difference_update(ids)
            self._ends.append(time.monotonic())

    def check_number(self, prompts: int) -> None:
        """Raises:
        ApiError: 400, so many prompts never fit.
        """
        if prompts > self._max_queue:
            rule = f"the queue holds {self._max_queue}; send fewer prompts per request"
            raise ApiError(400, f"{prompts} prompts in one request: {rule}", "too_many_prompts", "prompt")

    @property
    def waiting(self) -> int:
        """Prompts that came in and do not run yet."""
        return max(0, len(self.under_way) - self._llm.stats().running)

    def _wait_s(self, waiting: int) -> int:
        """Seconds until half of those who wait are gone, at the rate of the last answers."""
        if len(self._ends) < 2:
            return _LEAST_WAIT
        gap = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(_MOST_WAIT, max(_LEAST_WAIT, math.ceil(gap * waiting / 2)))

    async def drain(self, within_s: float) -> None:
        """Let nobody in, give what runs `within_s` seconds, then end it with what it has."""
        self.draining = True
        end = time.monotonic() + within_s
        while self.under_way and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await asyncio.gather(*(self._llm.cancel(request) for request in list(self.under_way)))


def _after(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(seconds)}
