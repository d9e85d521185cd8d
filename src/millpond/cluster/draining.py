"""Draining: a worker gives its requests to others and has none at the end."""

from __future__ import annotations

import asyncio
import time

from millpond.cluster.background_tasks import BackgroundTasks, quietly
from millpond.cluster.handle import WorkerHandle
from millpond.cluster.handoff import HandoffGoneError
from millpond.cluster.ledger import LedgerEntry
from millpond.cluster.moves import RETRY_S, Mover, RequestBook
from millpond.errors import MillpondError

#: Seconds in which requests move; what is left then is begun again elsewhere.
DRAIN_S = 1.5


class Drain:
    """One drain of a worker that gets no new requests any more.

    Args:
        within_s: seconds in which requests move with their caches; what is left then is begun again elsewhere.
    """

    def __init__(
        self, handle: WorkerHandle, book: RequestBook, mover: Mover, tasks: BackgroundTasks, within_s: float = DRAIN_S
    ) -> None:
        self._handle, self._book, self._mover, self._tasks = handle, book, mover, tasks
        self._until = time.monotonic() + within_s
        self._seen: dict[LedgerEntry, int] = {}  # with the epoch in which it was here
        self._replayed = 0

    async def run(self) -> tuple[int, int]:
        """Wait until the worker has no request; returns how many were moved, and how many begun again."""
        while (here := self._book.at(self._handle.name)) and time.monotonic() < self._until:
            for entry in here:
                self._seen.setdefault(entry, entry.epoch)
                if entry.place == "running":
                    entry.place = "leaving"
                    self._tasks.run(self._give(entry))
            await asyncio.sleep(RETRY_S / 4)
        for entry in self._book.at(self._handle.name):
            self._again(entry)
        moved = sum(one.epoch == epoch and one.worker != self._handle.name for one, epoch in self._seen.items())
        return moved, self._replayed

    async def _give(self, entry: LedgerEntry) -> None:
        """Let a request move to another worker; one without an answer is begun again there, and read there."""
        name = entry.name
        if not entry.begun:
            self._again(entry)
            return
        while self._book.current(name, entry) and entry.place == "leaving":
            try:
                n_bytes = await self._handle.offer(name)
            except HandoffGoneError:
                if self._book.current(name, entry):
                    self._again(entry)
                return
            except MillpondError:  # it is lost, or the request cannot be packed: it is begun again
                return
            if n_bytes is None:
                await asyncio.sleep(RETRY_S)
            elif self._book.current(name, entry):
                await self._mover.move(entry, self._handle, n_bytes)
            else:
                await quietly(self._handle.release(name))

    def _again(self, entry: LedgerEntry) -> None:
        self._replayed += 1
        name = entry.name
        self._book.begin_again(entry, lost=False)
        self._book.withdraw(self._handle, name)
