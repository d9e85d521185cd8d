"""Preemption of requests when pages run out, and their resumption."""

from __future__ import annotations

from collections import Counter

import numpy as np

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.coded.kept_coder import KeptFacts
from millpond.cache.coded.kept_swap import KeptSwapCoding
from millpond.cache.coded.swap import SequenceFacts, SwapCoding
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.coded.exact import exact_positions
from millpond.engine.coded.sequence_codec import has_codes
from millpond.engine.components import Components
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.memory_estimate import pages_to_read
from millpond.engine.request_state import RequestState
from millpond.engine.request_table import RequestTable
from millpond.engine.scheduler import Step
from millpond.engine.scheduler_request import RequestStatus, SchedulerRequest
from millpond.errors import DataError


class Preemptor:
    """Swaps requests out and in, so that a step finds the pages it needs.

    Args:
        parts: Parts of the engine.

    Attributes:
        lost: Requests that could not be swapped out or in, or failed as they began; the caller ends them.
    """

    def __init__(self, parts: Components) -> None:
        self.lost: list[RequestState] = []
        self._counts = parts.counts
        self._scheduler, self._requests = parts.scheduler, parts.requests
        self._prefix_cache, self._shared_prefixes = parts.prefix_cache, parts.shared_prefixes
        self._swap_files, self._tier = parts.swap_files, parts.disk_tier
        self._file_loads = parts.file_loads
        self._decoding: list[RequestState] = []  # preempted, and their codes are being decoded
        self._codec = parts.sequence_codec if parts.config.preemption == "codes" else None

    def pop_lost(self) -> list[RequestState]:
        """Return the requests in `lost`, which is empty afterwards."""
        lost, self.lost = self.lost, []
        return lost

    def prepare(self, step: Step) -> None:
        """Preempt and resume as the step says, and preempt more until the rest of it fits.

        Pages of prompts that are kept for others go before any request does, and so do shared prefixes. A request that
        is alone is never swapped out: if it does not fit, running it raises.
        """
        self._end_decoding()
        for scheduled in step.release:
            self._shared_prefixes.release(self._requests[scheduled.key])
        for scheduled in step.preempt:
            self._preempt(scheduled)
        for scheduled in step.resume:
            self._resume(scheduled)
        if self._tier is not None:
            for scheduled, _ in step.prefills:
                if not self._tier.has_reserved(scheduled.key):
                    self._reserve(scheduled, self._tier)
        while not self._fits(step):
            if self._shared_prefixes.release_newest():
                continue
            if self._scheduler.count(RequestStatus.PREFILL, RequestStatus.DECODE) < 2:
                return
            victim = self._scheduler.preempt_newest()
            assert victim is not None, "a running request can be swapped out"
            self._preempt(victim)

    def has_room(self, step: Step) -> bool:
        """Return whether a step finds its pages without preemption.

        Prompts that are kept for others may go.
        """
        return self._fits(step)

    def _end_decoding(self) -> None:
        """Let requests whose codes are decoded resume; wait for one where nothing runs."""
        idle = not self._scheduler.count(RequestStatus.PREFILL, RequestStatus.DECODE)
        for state in self._decoding:
            if state.private_cache is None or state.private_cache.prepare_swap_in(wait=idle):
                state.scheduled.is_loading = idle = False
        self._decoding = [state for state in self._decoding if state.scheduled.is_loading]

    def _preempt(self, scheduled: SchedulerRequest) -> None:
        state = self._requests[scheduled.key]
        if scheduled.is_shared_prefix:
            return self._shared_prefixes.release(state)
        self._shared_prefixes.detach(state, swapped=True)
        if state.private_cache is None:
            state.private_cache = (
                state.group.cache_factory.make_cache(len(state.ids))
                if scheduled.num_computed_tokens < scheduled.num_prompt_tokens
                else state.group.part(state.unfinished)
            )
        try:
            state.private_cache.swap_out(self._swap_files, self._coding(state, state.private_cache))
        except Exception as error:
            self._fail(state, error)
        self._counts["preemptions"] += 1

    def _coding(self, state: RequestState, batch_cache: BatchCache) -> SwapCoding | KeptSwapCoding | None:
        """Return how the cache of a request is coded; None: it is not."""
        if self._codec is None or not batch_cache.n_seq or state.prompt_logprobs is not None:
            return None
        if state.marks.forget or state.decoded:
            return None  # tokens from coded blocks of the prefix cache are not coded again
        cache_factory, scheduled = state.group.cache_factory, state.scheduled
        evicted = self._codec.kept.has_codes(cache_factory)
        if evicted and scheduled.num_computed_tokens < scheduled.num_prompt_tokens:
            return None  # what is kept follows from the whole prompt, as the model made it
        if not evicted and not has_codes(cache_factory):
            return None
        exact = exact_positions(state, len(batch_cache.layers))
        answers = [
            (completion, np.concatenate([state.ids_array, np.array(completion.tokens, dtype=np.int64)])[:seen])
            for completion, seen in zip(state.unfinished, batch_cache.tracker.seen.tolist(), strict=False)
        ]
        if evicted:
            kept = [KeptFacts(ids, exact, completion.kept) for completion, ids in answers]
            return KeptSwapCoding(self._codec.kept.coder, self._codec.thread, kept)
        facts = [SequenceFacts(ids, exact, completion.codes) for completion, ids in answers]
        return SwapCoding(self._codec.coder, self._codec.thread, facts)

    def _resume(self, scheduled: SchedulerRequest) -> None:
        state = self._requests[scheduled.key]
        assert state.private_cache is not None, "a resumed request was swapped out"
        alone = self._scheduler.count(RequestStatus.PREFILL, RequestStatus.DECODE) == 1
        if not state.private_cache.prepare_swap_in(wait=alone):
            scheduled.status, scheduled.is_loading = RequestStatus.PREEMPTED, True
            self._decoding.append(state)
            return
        if not self._prefix_cache.make_room(state.private_cache.pages_to_swap_in()):
            self._scheduler.postpone_resume(scheduled)
            return
        was_coded = state.private_cache.is_coded
        try:
            codes = state.private_cache.swap_in()
        except Exception as error:
            if was_coded and isinstance(error, DataError):
                return self._begin_again(state)
            self._scheduler.postpone_resume(scheduled)
            return self._fail(state, error)
        if codes is not None:  # all answers share one sequence while their prompt is read
            for index, completion in enumerate(state.unfinished):
                completion.decoded_from(codes[min(index, len(codes) - 1)], scheduled.num_computed_tokens)
        if scheduled.num_computed_tokens == scheduled.num_prompt_tokens:
            state.group = state.group.with_room(len(state.unfinished))
            state.group.join(state.private_cache, state.unfinished)
            state.private_cache = None

    def _begin_again(self, state: RequestState) -> None:
        """Let a request whose codes are damaged read its prompt again.

        The tokens that it has follow.
        """
        state.begin_again()
        self._scheduler.restart(state.scheduled, len(state.unfinished))
        for loads in self._file_loads:
            loads.forget(state)
            loads.add(state)

    def _reserve(self, scheduled: SchedulerRequest, tier: DiskTier) -> None:
        """Reserve the disk space of a request that begins; where it is missing the request ends."""
        state = self._requests[scheduled.key]
        try:
            tier.reserve(state.request.request_id, scheduled.memory_need.disk)
        except DataError as error:
            self._scheduler.postpone_resume(scheduled)
            self._fail(state, error)

    def _fail(self, state: RequestState, error: Exception) -> None:
        """Free the pages of a request that cannot continue."""
        if state.private_cache is not None:
            state.private_cache.clear()
        state.fail(error)
        self.lost.append(state)

    def _fits(self, step: Step) -> bool:
        """Return whether the step has enough pages, or will without prompts kept for others."""
        if self._prefix_cache.make_room(self._pages(step)):
            return True
        ending = list(dict.fromkeys([*self._finishing_prompts(step), *self._holding_sums(step)]))
        for state in ending:  # unshared pages are freed before its plan writes; it is kept again by then
            self._prefix_cache.remove(state)
        return bool(ending) and self._prefix_cache.make_room(self._pages(step))

    def _finishing_prompts(self, step: Step) -> list[RequestState]:
        """Return the requests whose pages will be written again.

        Their prompts will have been read, or the part that fills the context, so that a plan follows, or a span is
        dropped.
        """
        return [
            state
            for scheduled, n in step.prefills
            if scheduled.is_running
            and not scheduled.is_shared_prefix
            and self._rewrites(state := self._requests[scheduled.key], n)
        ]

    @staticmethod
    def _rewrites(state: RequestState, n: int) -> bool:
        return (
            state.compacts_after(n)
            or state.drops_span_after(n)
            or state.scheduled.num_computed_tokens + n == state.scheduled.num_prompt_tokens
        )

    def _holding_sums(self, step: Step) -> list[RequestState]:
        """Return requests that read parts of their prompts with sums.

        They hold copies of blocks that the tree holds too.
        """
        states = [self._requests[scheduled.key] for scheduled, _ in step.prefills if scheduled.is_running]
        return [state for state in states if state.group.cache_factory.policy.sums_prompt]

    def _pages(self, step: Step) -> Pages:
        """Return the pages that the running part of the step may take."""
        need: Counter[Pool] = Counter()
        for group in groups_of(step, self._requests):
            need.update(group.batch_cache.pages_for_step())
        for scheduled, n in step.prefills:
            if scheduled.is_running:
                state = self._requests[scheduled.key]
                need.update(self._pages_to_read(state, n))
        for state in self._finishing_prompts(step):
            need.update(self._prefix_cache.plan_pages(state))
            if (slots := state.group.cache_factory.slots) is not None:
                need[slots] += len(state.unfinished) - 1
        return dict(need)

    def _pages_to_read(self, state: RequestState, n: int) -> Pages:
        if state.private_cache is not None and state.private_cache.n_seq:
            return state.private_cache.pages_for(n)
        cache_factory = state.group.cache_factory
        need = Counter(pages_to_read(cache_factory, len(state.ids), n))
        if (slots := state.group.cache_factory.slots) is not None:
            need[slots] += 1
        return dict(need)


def groups_of(step: Step, requests: RequestTable) -> list[DecodeGroup]:
    """Return the groups that decode in a step, each once."""
    return list(dict.fromkeys(requests[scheduled.key].group for scheduled in step.decodes if scheduled.is_running))
