"""Shared prefixes of a planned batch: common beginnings of prompts, read as requests of their own and pinned.

A shared prefix is a cache whose prompt was not planned. A request that begins with it starts with a copy of that state:
its pages are shared until one of the two writes, and sums over queries (column sums, moments, the queries
themselves) continue from there. So a beginning may end inside a page, which is then copied, and is exact for methods
that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.batch_plan import BatchPlan, plan_batch
from millpond.engine.memory_estimate import estimate_after_prefix, estimate_prefix, keeps_pages, shares_pages
from millpond.engine.outputs import Times
from millpond.engine.request import Request
from millpond.engine.request_state import RequestState
from millpond.engine.request_table import RequestTable
from millpond.engine.scheduler import Scheduler
from millpond.engine.scheduler_request import RequestStatus, SchedulerRequest
from millpond.runner.cache_factory import CacheFactory


class SharedPrefixes:
    """Adds shared prefixes, lets requests begin with them, and releases unneeded ones.

    Args:
        memory_limit: Limit that all pools share.
        scheduler: Scheduler of the engine.
        requests: Requests of the engine, shared prefixes among them.
        row_bytes: See `SchedulerRequest`, of the requests of a batch.
        tier: Disk for KV of some layers; None: all are in memory.
    """

    def __init__(
        self,
        memory_limit: MemoryLimit,
        scheduler: Scheduler,
        requests: RequestTable,
        row_bytes: int = 0,
        tier: DiskTier | None = None,
    ) -> None:
        self._tier = tier
        self._memory_limit, self._scheduler, self._requests = memory_limit, scheduler, requests
        self._row_bytes = row_bytes
        self._names = count()

    def plan(self, states: Sequence[RequestState], levels: int | None) -> BatchPlan:
        """Return the plan of requests of one kind; see `plan_batch`."""
        cache_factory = states[0].group.cache_factory if states else None
        if cache_factory is None or not can_begin(cache_factory):
            levels = 0
        answers = [float(sum(completion.max_new_tokens for completion in state.completions)) for state in states]
        plan = plan_batch([state.share_ids for state in states], answers, levels=levels)
        if cache_factory is None:
            return plan
        return replace(plan, pinned_bytes=estimate_prefix(cache_factory, plan.most_pinned, 0).shared)

    def add_planned(
        self, states: Sequence[RequestState], levels: int | None, take_in: Callable[[RequestState], None]
    ) -> None:
        """Add shared prefixes and requests to the queue in the order of their plan.

        Args:
            states: The requests.
            levels: See `plan_batch`.
            take_in: Adds a request.
        """
        by_kind: dict[Hashable, list[RequestState]] = {}
        for state in states:
            state.scheduled.row_bytes = self._row_bytes
            by_kind.setdefault((state.group, state.request.cache_salt), []).append(state)
        for alike in by_kind.values():
            plan = self.plan(alike, levels)
            added: dict[int, RequestState | None] = {-1: None}
            for reading in plan.readings:
                if reading.prompt is None:
                    common_prefix = plan.prefixes[reading.prefix]
                    parent = added[common_prefix.parent]
                    new_prefix = self._add(alike[common_prefix.prompt], common_prefix.length, parent)
                    added[reading.prefix] = new_prefix or parent
                else:
                    self._assign(alike[reading.prompt], added[reading.prefix])
                    take_in(alike[reading.prompt])
            self._end_unused([shared_prefix for shared_prefix in added.values() if shared_prefix is not None])

    def _add(self, state: RequestState, length: int, parent: RequestState | None) -> RequestState | None:
        """Add a shared prefix to the queue.

        Args:
            state: One of the requests that begin with it.
            length: Its tokens.
            parent: Shared prefix that it continues.

        Returns:
            The shared prefix; None: prompts of this method begin with none, or it does not fit.
        """
        ids, group = state.ids_array[:length], state.group
        if group.cache_factory.within_context(len(ids)) != len(ids) or len(ids) == group.cache_factory.reach:
            return None  # gaps close before its end
        alone = estimate_prefix(group.cache_factory, len(ids), 0)
        if not can_begin(group.cache_factory) or not self._fits_after(None, alone.prefill):
            return None
        name = next(name for number in self._names if (name := f"shared prefix {number}") not in self._requests)
        tokens = tuple(ids.tolist())
        scheduled = SchedulerRequest(name, len(tokens), alone, num_answers=0, is_shared_prefix=True)
        request = Request(request_id=name, prompt=tokens, cache_salt=state.request.cache_salt)
        images = state.images and state.images.first(length)
        shared_prefix = RequestState(request, tokens, scheduled, group, [], Times(0.0), images=images)
        if parent is not None:
            after_parent = estimate_prefix(group.cache_factory, len(tokens), len(parent.ids))
            if self._fits_after(parent, after_parent.prefill):
                self._attach(shared_prefix, parent)
                scheduled.memory_need = after_parent
        self._requests.add(shared_prefix)
        self._scheduler.add(scheduled)
        return shared_prefix

    def _assign(self, state: RequestState, shared_prefix: RequestState | None) -> None:
        """Let a request begin with a shared prefix, or with the nearest parent with which it fits.

        Or with none. A request whose prompt's log probabilities are requested reads all of it, as does one of which
        spans are dropped; one with chunks takes them from a store.
        """
        if state.prompt_logprobs is not None or state.spans or state.marks.forget:
            return
        while shared_prefix is not None:
            need = estimate_after_prefix(
                state.group.cache_factory,
                state.whole_need,
                len(state.ids),
                state.scheduled.num_answers,
                len(shared_prefix.ids),
            )
            if self._fits_after(shared_prefix, need.peak(state.scheduled.num_answers)):
                self._attach(state, shared_prefix)
                state.scheduled.memory_need = need
                return
            shared_prefix = shared_prefix.shared_prefix

    def attach(self, state: RequestState) -> int:
        """Copy the cache of a shared prefix to a request that begins, see `PromptSource`.

        The request may be a shared prefix itself.
        """
        shared_prefix = state.shared_prefix
        if shared_prefix is None or shared_prefix.private_cache is None:
            return 0
        state.private_cache = state.group.cache_factory.make_cache(len(state.ids))
        shared_prefix.private_cache.copy_to([0], state.private_cache)
        if not shares_pages(state.group.cache_factory):
            self.detach(state)
        return len(shared_prefix.ids)

    def on_prompt_planned(self, state: RequestState) -> None:
        """Detach a request whose prompt was planned, unless its pages stay."""
        if state.shared_prefix is not None and not keeps_pages(state.group.cache_factory):
            self.detach(state)

    def detach(self, state: RequestState, *, swapped: bool = False) -> None:
        """Detach a request from its shared prefix; release one that nothing needs.

        Args:
            state: The request.
            swapped: Whether it had to leave the pool, and returns with pages of its own.
        """
        shared_prefix = state.shared_prefix
        if swapped and shared_prefix is not None:
            state.scheduled.memory_need = state.whole_need
        while shared_prefix is not None:
            state.shared_prefix = state.scheduled.prefix = None
            shared_prefix.users.discard(state)
            if shared_prefix.users:
                return
            self._end(shared_prefix)
            state, shared_prefix = shared_prefix, shared_prefix.shared_prefix

    def release(self, shared_prefix: RequestState) -> None:
        """Release a shared prefix: requests that have not begun with it run as if there were none.

        A released one is no error.
        """
        if self._requests.get(shared_prefix.request.request_id) is not shared_prefix:
            return
        for state in list(shared_prefix.users):
            state.shared_prefix = state.scheduled.prefix = None
            if state.private_cache is None:
                state.scheduled.memory_need = state.whole_need
        shared_prefix.users.clear()
        self._end(shared_prefix)
        self.detach(shared_prefix)

    def release_newest(self) -> bool:
        """Release the newest shared prefix whose pages no other holds; return False if none is."""
        held = self._requests.with_status(RequestStatus.PINNED)
        idle = [
            shared_prefix for shared_prefix in held if all(user.private_cache is None for user in shared_prefix.users)
        ]
        if not idle:
            return False
        self.release(max(idle, key=lambda shared_prefix: shared_prefix.scheduled.arrival))
        return True

    def _end_unused(self, added: list[RequestState]) -> None:
        """Release new shared prefixes that nothing begins with."""
        for shared_prefix in reversed(added):  # children come after their parents
            if not shared_prefix.users:
                self.release(shared_prefix)

    def _attach(self, state: RequestState, shared_prefix: RequestState) -> None:
        state.shared_prefix, state.scheduled.prefix = shared_prefix, shared_prefix.scheduled
        shared_prefix.users.add(state)

    def _fits_after(self, shared_prefix: RequestState | None, n_bytes: int) -> bool:
        """Return whether `n_bytes` fit together with a shared prefix and all those it continues."""
        limit = self._memory_limit.limit_bytes
        while shared_prefix is not None:
            n_bytes += shared_prefix.scheduled.memory_need.shared
            shared_prefix = shared_prefix.shared_prefix
        return limit is None or n_bytes <= limit

    def _end(self, shared_prefix: RequestState) -> None:
        shared_prefix.scheduled.status = RequestStatus.RELEASED
        if shared_prefix.private_cache is not None:
            shared_prefix.private_cache.clear()
            shared_prefix.private_cache = None
        if self._tier is not None:
            self._tier.release(shared_prefix.request.request_id)
        self._scheduler.remove(shared_prefix.scheduled)
        self._requests.remove(shared_prefix)


def can_begin(cache_factory: CacheFactory) -> bool:
    """Return whether a prompt can begin with a copy of the state after its beginning.

    It cannot where entries are evicted before the prompt was read, where keys turn with evictions, where a prompt must
    be read in one pass, and in hybrids with recurrent states.
    """
    policy = cache_factory.policy
    read_whole = policy.prefill == "once" and policy.positions == "absolute" and not cache_factory.whole_prompt
    return read_whole and cache_factory.slots is None and cache_factory.host_kv is None
