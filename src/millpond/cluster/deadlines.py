"""Deadlines: ends requests whose time is up and whose worker does not say so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millpond.cluster.ledger import LedgerEntry

#: Seconds after a deadline in which the worker of a request may end it with its last tokens.
GRACE_S = 0.5


class Deadlines:
    """Timers of the requests of one event loop. expired: called with each request that is still there."""

    def __init__(self, expired: Callable[[LedgerEntry], None]) -> None:
        self._expired = expired
        self._timers: dict[LedgerEntry, asyncio.TimerHandle] = {}

    def watch(self, entry: LedgerEntry) -> None:
        """A request arrives. One with a deadline that is none is left to the engine, which refuses it."""
        deadline = entry.request.deadline
        if deadline is not None and deadline > 0:
            loop = asyncio.get_running_loop()
            self._timers[entry] = loop.call_later(deadline + GRACE_S, self._expired, entry)

    def forget(self, entry: LedgerEntry) -> None:
        """A request has ended."""
        timer = self._timers.pop(entry, None)
        if timer is not None:
            timer.cancel()
