"""Ends of prompts: evictions are planned, and the answers join those that decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from millpond.cache.batch_cache import Pages
from millpond.engine.components import Components
from millpond.engine.decode_group import figures_of
from millpond.engine.forget import record_forgotten
from millpond.engine.prefix_cache import sum_pages
from millpond.engine.request_state import RequestState


class PromptEnd:
    """Plans what stays of prompts that were read, or of the part of one that fills the context."""

    def __init__(self, parts: Components) -> None:
        self._layers, self._sessions = parts.model.layers, parts.sessions
        self._prefix_cache, self._shared_prefixes = parts.prefix_cache, parts.shared_prefixes

    def compact_context(self, state: RequestState) -> None:
        """The context is full and the prompt goes on: plan what was read, and close gaps."""
        self._prefix_cache.insert_blocks(state)
        batch_cache = state.private_cache
        assert batch_cache is not None, "a prompt that is being read has a cache"
        batch_cache.run_plans()
        batch_cache.close_gaps(0)
        batch_cache.reading = True

    def finish_prompts(self, read: Sequence[RequestState]) -> None:
        """The prompts of requests are read and their first tokens chosen: plan evictions, and decode with the others.

        Whatever goes wrong with one of them ends it.
        """
        for state, later in zip(read, self._pages_of_later_plans(read), strict=True):
            self._finish_prompt(state, later)

    def _pages_of_later_plans(self, read: Sequence[RequestState]) -> list[Pages]:
        """For each prompt that was read, the pages that the plans of those after it may take."""
        needs: list[Pages] = [{}]
        for state in reversed(read[1:]):
            needs.append(sum_pages(needs[-1], self._prefix_cache.plan_pages(state)))
        return needs[::-1] if read else []

    def _finish_prompt(self, state: RequestState, later: Pages) -> None:
        """later: pages that others may take in this step."""
        batch_cache = state.private_cache
        assert batch_cache is not None, "a prompt that was read has a cache"
        if state.times.first_token is None:
            state.times = replace(state.times, first_token=time.monotonic())
        with state.own_work():
            self._prefix_cache.insert(state, later)
            if state.unfinished or self._sessions is not None:
                batch_cache.run_plans()
                for error in batch_cache.pop_failed().values():
                    raise error
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
