"""Preemption of requests when pages run out, and their resumption."""

from __future__ import annotations

from collections import Counter

from millpond.cache.batch_cache import Pages
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.components import Components
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.memory_estimate import held_while_reading, one_at_a_time
from millpond.engine.request_state import RequestState
from millpond.engine.request_table import RequestTable
from millpond.engine.scheduler import Job, State, Step
from millpond.errors import DataError


class Preemptor:
    """Carries requests out and in, so that a step finds the pages it needs.

    Attributes:
        lost: requests that could not be swapped out or in, or failed as they began; the caller ends them.
    """

    def __init__(self, parts: Components) -> None:
        self.lost: list[RequestState] = []
        self._counts = parts.counts
        self._scheduler, self._requests, self._layers = parts.scheduler, parts.requests, parts.model.layers
        self._sharing, self._trunks = parts.prefix_cache, parts.shared_prefixes
        self._files, self._tier = parts.swap_files, parts.disk_tier

    def pop_lost(self) -> list[RequestState]:
        """The requests in `lost`, which is empty afterwards."""
        lost, self.lost = self.lost, []
        return lost

    def prepare(self, step: Step) -> None:
        """Carry out and in as the step says, and carry out more until the rest of it has room.

        Pages of prompts that are kept for others go before any request does, and so do trunks. A request that is alone
        is never swapped out: if it does not fit, running it raises.
        """
        for job in step.drop:
            self._trunks.let_go(self._requests[job.key])
        for job in step.out:
            self._preempt(job)
        for job in step.back:
            self._resume(job)
        if self._tier is not None:
            for job, _ in step.chunks:
                if not job.read and self._requests[job.key].stack is None:
                    self._reserve(job, self._tier)
        while not self._has_all(step):
            if self._trunks.let_one_go():
                continue
            if self._scheduler.count(State.READING, State.DECODING) < 2:
                return
            victim = self._scheduler.victim()
            assert victim is not None, "a running request can be swapped out"
            self._preempt(victim)

    def _preempt(self, job: Job) -> None:
        live = self._requests[job.key]
        if job.trunk:
            return self._trunks.let_go(live)
        self._trunks.leave(live, swapped=True)
        if live.stack is None:
            live.stack = (
                live.group.recipe.stack(len(live.ids)) if job.read < job.prompt else live.group.part(live.unfinished)
            )
        try:
            live.stack.swap_out(self._files)
        except Exception as error:
            self._lose(live, error)
        self._counts["preemptions"] += 1

    def _resume(self, job: Job) -> None:
        live = self._requests[job.key]
        assert live.stack is not None, "a resumed request was swapped out"
        if not self._sharing.has(live.stack.pages_to_swap_in()):
            self._scheduler.defer(job)
            return
        try:
            live.stack.swap_in()
        except Exception as error:
            self._scheduler.defer(job)
            return self._lose(live, error)
        if job.read == job.prompt:
            live.group = live.group.with_room(len(live.unfinished))
            live.group.join(live.stack, live.unfinished)
            live.stack = None

    def _reserve(self, job: Job, tier: DiskTier) -> None:
        """Room on the disk for a request that begins; where there is none it ends."""
        live = self._requests[job.key]
        try:
            tier.reserve(live.request.request_id, job.need.disk)
        except DataError as error:
            self._scheduler.defer(job)
            self._lose(live, error)

    def _lose(self, live: RequestState, error: Exception) -> None:
        """Its pages are free, and it cannot continue."""
        if live.stack is not None:
            live.stack.clear()
        live.fail(error)
        self.lost.append(live)

    def _has_all(self, step: Step) -> bool:
        """Whether what runs in the step has room, or will have without prompts that only others might want."""
        if self._sharing.has(self._pages(step)):
            return True
        ending = list(dict.fromkeys([*self._ending(step), *self._with_sums(step)]))
        for live in ending:  # unshared pages are freed before its plan writes; it is kept again by then
            self._sharing.let_go(live)
        return bool(ending) and self._sharing.has(self._pages(step))

    def _ending(self, step: Step) -> list[RequestState]:
        """Requests whose prompts will have been read, or as much of them as the context holds, so that a plan follows,
        or a span that leaves: their pages are written again."""
        return [
            live
            for job, n in step.chunks
            if job.running and not job.trunk and self._rewrites(live := self._requests[job.key], n)
        ]

    @staticmethod
    def _rewrites(live: RequestState, n: int) -> bool:
        return live.rolls(n) or live.forgets(n) or live.job.read + n == live.job.prompt

    def _with_sums(self, step: Step) -> list[RequestState]:
        """Requests that read parts of their prompts with sums: they hold copies of blocks that the tree holds too."""
        lives = [self._requests[job.key] for job, _ in step.chunks if job.running]
        return [live for live in lives if live.group.recipe.policy.sums_prompt]

    def _pages(self, step: Step) -> Pages:
        """Pages that the running part of the step may take."""
        need: Counter[Pool] = Counter()
        for group in groups_of(step, self._requests):
            need.update(group.stack.pages_for_step())
        for job, n in step.chunks:
            if job.running:
                live = self._requests[job.key]
                need.update(self._pages_to_read(live, n))
        for live in self._ending(step):
            need.update(self._sharing.pages_to_settle(live))
            if (slots := live.group.recipe.slots) is not None:
                need[slots] += len(live.unfinished) - 1
        return dict(need)

    def _pages_to_read(self, live: RequestState, n: int) -> Pages:
        if live.stack is not None and live.stack.n_seq:
            return live.stack.pages_for(n)
        recipe = live.group.recipe
        pages: list[Pages] = []
        for index, layer in enumerate(self._layers):
            pool = recipe.prompt_pool(layer)
            held = min(n, held_while_reading(recipe, index, layer, len(live.ids)))
            pages.append({pool: layer.n_kv_heads * -(-held // pool.slots)})
        need = Counter(one_at_a_time(recipe, pages))
        if (slots := live.group.recipe.slots) is not None:
            need[slots] += 1
        return dict(need)


def groups_of(step: Step, requests: RequestTable) -> list[DecodeGroup]:
    """The groups that decode in a step, each once."""
    return list(dict.fromkeys(requests[job.key].group for job in step.decodes if job.running))
