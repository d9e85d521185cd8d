"""Ends of prompts: evictions are planned, and the answers join the decoding ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from millpond.cache.batch_cache import Pages
from millpond.engine.components import Components
from millpond.engine.decode_group import figures_of
from millpond.engine.forget import record_forgotten
from millpond.engine.request_state import RequestState
from millpond.engine.sharing import sum_pages


class PromptEnd:
    """Plans which entries of a prompt stay, at its end or when a part fills the context.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: Components) -> None:
        self._layers, self._sessions = parts.model.layers, parts.sessions
        self._prefix_cache, self._shared_prefixes = parts.prefix_cache, parts.shared_prefixes

    def compact_context(self, state: RequestState) -> None:
        """Plan the part that was read and close gaps: the context is full, more of it follows."""
        self._prefix_cache.insert_blocks(state)
        batch_cache = state.private_cache
        assert batch_cache is not None, "a prompt that is being read has a cache"
        batch_cache.run_plans()
        batch_cache.close_gaps(0)
        batch_cache.reading = True

    def finish_prompts(self, read: Sequence[RequestState]) -> None:
        """Plan evictions of prompts that were read, and let their answers decode with the others.

        Their first tokens are chosen. An error in one of them ends that request alone.
        """
        for state, later in zip(read, self._pages_of_later_plans(read), strict=True):
            self._finish_prompt(state, later)

    def _pages_of_later_plans(self, read: Sequence[RequestState]) -> list[Pages]:
        """Return for each prompt that was read the pages that later plans may take."""
        needs: list[Pages] = [{}]
        for state in reversed(read[1:]):
            needs.append(sum_pages(needs[-1], self._prefix_cache.plan_pages(state)))
        return needs[::-1] if read else []

    def _finish_prompt(self, state: RequestState, pages_of_later: Pages) -> None:
        """Finish one prompt.

        Args:
            state: The request.
            pages_of_later: Pages that other requests may take in this step.
        """
        batch_cache = state.private_cache
        assert batch_cache is not None, "a prompt that was read has a cache"
        if state.times.first_token is None:
            state.times = replace(state.times, first_token=time.monotonic())
        state.samples = batch_cache.samples
        with state.own_work(in_pass=True):
            self._prefix_cache.insert(state, pages_of_later)
            if state.unfinished or self._sessions is not None:
                batch_cache.run_plans()
                for error in batch_cache.pop_failed().values():
                    raise error
                self._prefix_cache.insert_codes(state)
            self._shared_prefixes.on_prompt_planned(state)
        with state.own_work():
            (figures,) = figures_of(batch_cache, state.group.cache_factory, self._layers)
            for completion in state.completions:
                completion.count(figures)
            record_forgotten(state)
        unfinished = state.unfinished
        if unfinished:
            batch_cache.select([0] * len(unfinished))
            state.group = state.group.with_room(len(unfinished))
            state.group.join(batch_cache, unfinished)
            state.private_cache = None
