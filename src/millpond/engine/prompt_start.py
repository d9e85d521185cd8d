"""Starts of prompts: tokens that others have computed are taken over before the rest is read."""

from __future__ import annotations

from typing import Protocol

from millpond.engine.completion import ReuseCounts
from millpond.engine.components import Components
from millpond.engine.forget import record_dropped, until_forgotten
from millpond.engine.request_state import RequestState
from millpond.engine.scheduler import Step
from millpond.engine.scheduler_request import RequestStatus, SchedulerRequest

#: Most steps that a prompt waits for others to read what it begins with, before it reads that itself.
MAX_WAITED = 8


class PromptSource(Protocol):
    """Source of the first tokens of a prompt, which need not be computed then."""

    def attach(self, state: RequestState) -> int:
        """Give a prompt that begins a cache of its first tokens, and return how many; 0: none."""
        ...


class PromptStart:
    """Starts prompts: with a blend of chunks, or with tokens of the first source that has any.

    The sources are a shared prefix of its batch, the stored cache of an earlier turn, and the prefix cache.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: Components) -> None:
        self._scheduler, self._requests, self._counts = parts.scheduler, parts.requests, parts.counts
        self._chunk_reuse, self._chunk_loads = parts.chunk_reuse, parts.chunk_loads
        self._sessions, self._prefix_cache = parts.sessions, parts.prefix_cache
        sources = (parts.shared_prefixes, parts.sessions, parts.prefix_cache)
        self._sources: list[PromptSource] = [source for source in sources if source is not None]

    def attach_prefixes(self, step: Step) -> list[RequestState]:
        """Let prompts that begin in a step take over what others have read.

        Fewer of their tokens are read then. A prompt whose next block is being read for another waits for it, a few
        steps at most.

        Returns:
            Requests that have ended, since this failed.
        """
        begun = [
            state for state in self._requests.with_status(RequestStatus.PREFILL) if state.private_cache is not None
        ]
        prefills: list[tuple[SchedulerRequest, int]] = []
        failed = []
        for scheduled, n in step.prefills:
            state = self._requests[scheduled.key]
            with state.own_work():
                if state.private_cache is None and state.shared_prefix is None:
                    if self._waits_for_reader(state, begun) or self._waits_for_codes(state):
                        continue
                    self._prefix_cache.add_common_breakpoints(state, self._requests)
                    begun.append(state)
                prefills.append(
                    (scheduled, until_forgotten(state, _within_reach(state, self._tokens_to_read(state, n))))
                )
            if state.failed:
                failed.append(state)
        step.prefills = prefills
        return failed

    def _waits_for_reader(self, state: RequestState, reading: list[RequestState]) -> bool:
        """Return whether a prompt passes this step while another is read that it begins with.

        A prompt that can only begin where sums are kept waits while the other comes nearer to that position.
        """
        if state.waited >= MAX_WAITED:
            return False
        reader = self._prefix_cache.find_reader(state, reading)
        if reader is None:
            return False
        if state.group.cache_factory.policy.sums_prompt and reader.scheduled.num_computed_tokens > state.reader_read:
            state.waited, state.reader_read = 0, reader.scheduled.num_computed_tokens
        else:
            state.waited += 1
        return True

    def _waits_for_codes(self, state: RequestState) -> bool:
        """Return whether a prompt passes this step while blocks that it begins with are decoded."""
        return not state.spans and self._prefix_cache.waits_for_codes(state)

    def _tokens_to_read(self, state: RequestState, n: int) -> int:
        """Return how many of the next `n` tokens of a prompt one pass reads.

        A prompt that begins takes over tokens first.
        """
        scheduled = state.scheduled
        begins = not scheduled.num_computed_tokens and state.private_cache is None
        if begins and state.blend is None and state.spans:
            self._blend(state)
        if state.blend is not None:
            return state.blend.reach(scheduled.num_computed_tokens, n)
        if begins:
            self._attach(state)
            if state.restored:
                return min(n, scheduled.num_prompt_tokens - scheduled.num_computed_tokens)
        return min(n, self._prefix_cache.next_stop(state) - scheduled.num_computed_tokens)

    def _attach(self, state: RequestState) -> None:
        """Let a prompt begin with the tokens of the first source that has some."""
        n_tokens = next((n for source in self._sources if (n := source.attach(state))), 0)
        if self._sessions is not None:
            self._sessions.loads.forget(state)  # where a shared prefix came before the stored turn
        self._scheduler.add_computed_tokens(state.scheduled, n_tokens, served=False)
        if state.restored:
            self._counts["restored_tokens"] += n_tokens
            for completion in state.completions:
                decoded = n_tokens if completion.was_coded else 0
                completion.reuse = ReuseCounts(n_tokens, decoded_tokens=decoded, exact=state.restored_exact)
            record_dropped(state)
            return
        self._counts["shared_tokens"] += n_tokens if state.completions else 0
        for completion in state.completions:
            completion.shared = n_tokens
            if state.decoded:
                completion.reuse = ReuseCounts(decoded_tokens=state.decoded, exact=False)

    def _blend(self, state: RequestState) -> None:
        """Choose which tokens of a prompt with chunks are computed, before it begins."""
        assert self._chunk_reuse is not None, "chunks without a store are refused"
        request, window = state.request, state.group.cache_factory.policy.window
        loaded = None if self._chunk_loads is None else self._chunk_loads.begin(state)
        state.blend = blend = self._chunk_reuse.begin(
            state.ids_array, state.spans, request.cache, window, request.cache_salt, loaded
        )
        for completion in state.completions:
            completion.reuse = ReuseCounts(
                reused_tokens=blend.n_reused, recomputed_tokens=blend.n_recomputed, exact=blend.exact
            )


def _within_reach(state: RequestState, n: int) -> int:
    """Return how many of the next `n` tokens of a prompt lie before the end of the context."""
    reach = state.group.cache_factory.reach
    return n if reach is None else min(n, reach - state.position)
