"""Admission control: counts requests in flight, rejects what would wait too long, and drains on shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from millpond.server.errors import ApiError
from millpond.server.llm_protocol import ServedLLM

#: Seconds that a refused client has to wait, at least and at most.
_MIN_WAIT, _MAX_WAIT = 1, 60
#: One of this many places in the queue is reserved for clients without requests in flight.
_FOR_OTHERS = 8
#: Seconds that requests have to end after the server stopped them on shutdown.
LEAVE_S = 2.5

_log = logging.getLogger(__name__)


class AdmissionControl:
    """In front of the engine.

    Attributes:
        under_way: Ids of admitted prompts that are not answered yet, with their clients.
        draining: Whether new requests are refused.
    """

    def __init__(self, llm: ServedLLM, max_queue: int, step_limit_s: float = math.inf) -> None:
        self.under_way: dict[str, str] = {}
        self.draining = False
        self._step_limit_s = step_limit_s
        self._drained_by: float | None = None
        self._llm = llm
        self._max_queue = max_queue
        self._under_way_of: Counter[str] = Counter()  # by client
        self._finish_times: deque[float] = deque(maxlen=32)

    @contextmanager
    def admit(self, ids: Sequence[str], client: str = "") -> Iterator[None]:
        """Admit some prompts, all or none.

        A client with prompts in flight cannot take the last places of the queue.

        Raises:
            ApiError: 503, the server is going down or the engine hangs; 429, too many wait already; 400, the
                prompts never fit.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", "shutting_down", headers=_after(_MIN_WAIT))
        if self.trouble is not None:
            message = f"{self.trouble}: new requests are refused"
            raise ApiError(503, message, "engine_stalled", headers=_after(_MAX_WAIT))
        self.check_number(len(ids))
        waiting = self.waiting
        holds = self._max_queue - (self._max_queue // _FOR_OTHERS if self._under_way_of[client] else 0)
        if waiting + len(ids) > holds:
            wait = self._wait_s(waiting)
            message = f"{waiting} prompts wait and the queue holds {holds} for you; try again in {wait} s"
            raise ApiError(429, message, "queue_full", headers=_after(wait))
        self.under_way |= dict.fromkeys(ids, client)
        self._under_way_of[client] += len(ids)
        try:
            yield
        finally:
            for one in ids:
                self.under_way.pop(one, None)
            self._under_way_of[client] -= len(ids)
            if not self._under_way_of[client]:
                del self._under_way_of[client]
            self._finish_times.append(time.monotonic())

    @property
    def clients(self) -> set[str]:
        """Clients with prompts in flight."""
        return set(self._under_way_of)

    def check_number(self, prompts: int) -> None:
        """Check a number of prompts.

        Raises:
            ApiError: 400, more prompts than the queue holds.
        """
        if prompts > self._max_queue:
            rule = f"the queue holds {self._max_queue}; send fewer prompts per request"
            raise ApiError(400, f"{prompts} prompts in one request: {rule}", "too_many_prompts", "prompt")

    @property
    def trouble(self) -> str | None:
        """Why the engine does not answer at the moment; None: it does."""
        return self._llm.trouble(self._step_limit_s)

    async def watch(self) -> None:
        """Log when the engine hangs, and when it continues."""
        known = False
        while True:
            trouble = self.trouble
            if trouble is not None and not known:
                _log.error("%s; /health says 503 until it continues", trouble)
            elif known and trouble is None:
                _log.warning("the engine continues")
            known = trouble is not None
            await asyncio.sleep(min(1.0, self._step_limit_s / 4))

    @property
    def waiting(self) -> int:
        """Admitted prompts that do not run yet."""
        return max(0, len(self.under_way) - self._llm.stats().running)

    def _wait_s(self, waiting: int) -> int:
        """Return the seconds until half of the waiting prompts are done, at the current rate."""
        if len(self._finish_times) < 2:
            return _MIN_WAIT
        gap = (time.monotonic() - self._finish_times[0]) / len(self._finish_times)
        return min(_MAX_WAIT, max(_MIN_WAIT, math.ceil(gap * waiting / 2)))

    async def drain(self, within_s: float) -> None:
        """Refuse new requests, and end the running ones after a while.

        Running ones have `within_s` seconds from the first call; then they end as they are. An engine that hangs ends
        nothing: the server waits `LEAVE_S` seconds more.
        """
        self.draining = True
        if self._drained_by is None:
            self._drained_by = time.monotonic() + within_s
        while self.under_way and time.monotonic() < self._drained_by:
            await asyncio.sleep(0.02)
        left = max(0.0, self._drained_by + LEAVE_S - time.monotonic())
        ends = asyncio.gather(*(self._llm.cancel(request) for request in list(self.under_way)), return_exceptions=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(ends, left)


def _after(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(seconds)}
