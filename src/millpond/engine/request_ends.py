"""Ends of requests: their memory is freed, and their results are kept for later readers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from millpond.engine.components import Components
from millpond.engine.forget import record_forgotten
from millpond.engine.outputs import FinishReason
from millpond.engine.request_state import RequestState


class RequestEnds:
    """Ends answers and requests, and frees their memory.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: Components) -> None:
        self._scheduler, self._sampler, self._requests = parts.scheduler, parts.sampler, parts.requests
        self._shared_prefixes, self._file_loads, self._snapshots = (
            parts.shared_prefixes,
            parts.file_loads,
            parts.snapshots,
        )
        self._sessions, self._tier, self._counts = parts.sessions, parts.disk_tier, parts.counts

    def end(self, state: RequestState, reason: FinishReason) -> None:
        """End all answers of a request as they are; a shared prefix is released."""
        if state.unfinished:
            self._snapshots.record(state)
        for completion in state.unfinished:
            completion.end(reason)
        record_forgotten(state)
        self.retire(state)

    def collect_finished(self, states: Sequence[RequestState]) -> None:
        """Retire what has ended of requests that have new tokens."""
        for state in states:
            first_completion = state.completions[0] if state.completions else None
            with state.own_work():
                if first_completion is not None and (
                    (first_completion.finished and first_completion in state.group.completions)
                    or state.private_cache is not None
                ):
                    self._snapshots.record(state)
                record_forgotten(state)
                if self._sessions is not None:
                    self._sessions.keep(state)
        for group in dict.fromkeys(state.group for state in states):
            group.leave()
        self.retire_all(states)

    def retire_all(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Retire requests, and return those with answers, without common prefixes of a batch."""
        for state in states:
            self.retire(state)
        return [state for state in states if state.completions]

    def retire(self, state: RequestState) -> None:
        """Forget the answers that have ended; after the last of them the request, or a prefix.

        A shared prefix is released.
        """
        if state.scheduled.is_shared_prefix:
            return self._shared_prefixes.release(state)
        unfinished = state.unfinished
        for completion in state.completions:
            if completion.finished:
                self._sampler.stop(completion.key)
        if unfinished:
            if len(unfinished) < state.scheduled.num_answers:
                self._scheduler.set_num_answers(state.scheduled, len(unfinished))
            return
        if state.private_cache is not None:
            state.private_cache.clear()
            state.private_cache = None
        state.group.leave()
        self._shared_prefixes.detach(state)
        self._release_loaded(state)
        if self._tier is not None:
            self._tier.release(state.request.request_id)
        self._scheduler.remove(state.scheduled)
        self._requests.remove(state)
        state.times = replace(state.times, finished=time.monotonic())
        self._counts["finished"] += 1
        self._counts["evicted_entries"] += sum(
            completion.kv.evicted for completion in state.completions if completion.kv is not None
        )

    def release_exported(self, state: RequestState) -> None:
        """Free the memory of a request that another engine continues; it has not ended."""
        self._shared_prefixes.detach(state)
        self._release_loaded(state)
        if state.private_cache is not None:
            state.private_cache.clear()
        elif state.scheduled.num_computed_tokens == state.scheduled.num_prompt_tokens:
            state.group.part(state.unfinished).clear()
        for completion in state.completions:
            self._sampler.stop(completion.key)
        self._scheduler.remove(state.scheduled)
        self._requests.remove(state)

    def _release_loaded(self, state: RequestState) -> None:
        """Release the chunks of the store and the stored turn of a request."""
        for loads in self._file_loads:
            loads.forget(state)
        if state.blend is not None:
            state.blend.release()
