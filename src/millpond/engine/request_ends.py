"""Ends of requests: what they held is given back, and what they came to is kept for who asks later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from millpond.engine.components import Components
from millpond.engine.forget import note_forgotten
from millpond.engine.outputs import FinishReason
from millpond.engine.request_state import RequestState


class RequestEnds:
    """Ends answers and requests, and frees what they hold."""

    def __init__(self, parts: Components) -> None:
        self._scheduler, self._sampler, self._requests = parts.scheduler, parts.sampler, parts.requests
        self._trunks, self._loads, self._memories = parts.shared_prefixes, parts.file_loads, parts.snapshots
        self._sessions, self._tier, self._counts = parts.sessions, parts.disk_tier, parts.counts

    def end(self, live: RequestState, reason: FinishReason) -> None:
        """All answers of a request end as they are; a trunk is let go."""
        if live.unfinished:
            self._memories.note(live)
        for answer in live.unfinished:
            answer.end(reason)
        note_forgotten(live)
        self.retire(live)

    def collect_finished(self, lives: Sequence[RequestState]) -> None:
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
        self.retire_all(lives)

    def retire_all(self, lives: Sequence[RequestState]) -> list[RequestState]:
        """See `retire`; returns those with answers, common prefixes of a batch left out."""
        for live in lives:
            self.retire(live)
        return [live for live in lives if live.answers]

    def retire(self, live: RequestState) -> None:
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
        self._counts["finished"] += 1
        self._counts["evicted_entries"] += sum(answer.kv.evicted for answer in live.answers if answer.kv is not None)

    def release_exported(self, live: RequestState) -> None:
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
