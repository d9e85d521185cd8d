"""Ends of requests: what they held is given back, and what they came to is kept for who asks later."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.cache_snapshots import SnapshotStore
from millpond.engine.file_loads import FileLoads
from millpond.engine.forget import note_forgotten
from millpond.engine.outputs import FinishReason
from millpond.engine.request_state import RequestState
from millpond.engine.request_table import RequestTable
from millpond.engine.sampling.sampler import Sampler
from millpond.engine.scheduler import Scheduler
from millpond.engine.sessions.reuse import SessionReuse
from millpond.engine.trunks import Trunks


class RequestEnds:
    """Ends answers and requests, and frees what they hold.

    Args:
        requests: the engine's. loads: what requests may wait for. memories: of layers of requests that
            are watched. sessions: where finished turns are stored; None: nowhere. tier: as `Engine` has it.

    Attributes:
        finished: requests that have ended. evicted: entries that their methods evicted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sampler: Sampler,
        requests: RequestTable,
        trunks: Trunks,
        loads: Sequence[FileLoads[Any]],
        memories: SnapshotStore,
        sessions: SessionReuse | None,
        tier: DiskTier | None,
    ) -> None:
        self._scheduler, self._sampler, self._requests, self._trunks = scheduler, sampler, requests, trunks
        self._loads, self._memories, self._sessions, self._tier = loads, memories, sessions, tier
        self.finished = self.evicted = 0

    def end(self, live: RequestState, reason: FinishReason) -> None:
        """All answers of a request end as they are; a trunk is let go."""
        if live.unfinished:
            self._memories.note(live)
        for answer in live.unfinished:
            answer.end(reason)
        note_forgotten(live)
        self.tidy(live)

    def forget(self, lives: Sequence[RequestState]) -> None:
        """Forget what has ended of requests that have new tokens."""
        for live in lives:
            first = live.answers[0] if live.answers else None
            with live.own_work():
                if first is not None and ((first.finished and first in live.group.answers) or live.stack is not None):
                    self._memories.note(live)
                note_forgotten(live)
                if self._sessions is not None:
                    self._sessions.keep(live)
        for group in dict.fromkeys(live.group for live in lives):
            group.leave()
        self.tidy_all(lives)

    def tidy_all(self, lives: Iterable[RequestState]) -> None:
        """See `tidy`."""
        for live in lives:
            self.tidy(live)

    def tidy(self, live: RequestState) -> None:
        """Forget the answers that have ended; and the request with the last of them, or a trunk."""
        if live.job.trunk:
            return self._trunks.let_go(live)
        going = live.unfinished
        for answer in live.answers:
            if answer.finished:
                self._sampler.stop(answer.key)
        if going:
            if len(going) < live.job.width:
                self._scheduler.set_width(live.job, len(going))
            return
        if live.stack is not None:
            live.stack.clear()
            live.stack = None
        live.group.leave()
        self._trunks.leave(live)
        self._release_loaded(live)
        if self._tier is not None:
            self._tier.release(live.request.request_id)
        self._scheduler.remove(live.job)
        self._requests.remove(live)
        live.times = replace(live.times, finished=time.monotonic())
        self.finished += 1
        self.evicted += sum(answer.kv.evicted for answer in live.answers if answer.kv is not None)

    def handed_over(self, live: RequestState) -> None:
        """Free what a request held that another engine continues; it has not ended."""
        self._trunks.leave(live)
        self._release_loaded(live)
        if live.stack is not None:
            live.stack.clear()
        elif live.job.read == live.job.prompt:
            live.group.part(live.unfinished).clear()
        for answer in live.answers:
            self._sampler.stop(answer.key)
        self._scheduler.remove(live.job)
        self._requests.remove(live)

    def _release_loaded(self, live: RequestState) -> None:
        """A request needs no more chunks of the store, nor a stored turn."""
        for loads in self._loads:
            loads.forget(live)
        if live.blend is not None:
            live.blend.release()
