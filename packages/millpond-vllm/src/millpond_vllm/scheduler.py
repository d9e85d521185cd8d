"""Schedulers that evict: they time evictions, end chunks there, and limit hits of the prefix cache."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from millpond import MillpondError
from millpond_vllm import compat
from millpond_vllm.block_checks import check_blocks, wanted
from millpond_vllm.block_manager import EvictingManager
from millpond_vllm.engine_check import check_engine
from millpond_vllm.event_times import NEVER, EventTimes
from millpond_vllm.figures import EngineTotals, EvictionCounts, FigureReporter, metric_labels, request_figures
from millpond_vllm.messages import Eviction, Observation, StepOrders, StepPart
from millpond_vllm.settings import KEY, BlockRules, RequestSettings

logger = init_logger("vllm.millpond")


class EvictingScheduler(Scheduler):
    """vLLM's scheduler with eviction.

    Attributes:
        manager: Blocks of the group of full-attention layers.
        rules: Rules of the engine.
        totals: Figures of all requests.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        compat.install()
        settings = check_engine(vllm_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.manager: EvictingManager = compat.evicting_manager(self.kv_cache_manager)
        pool = self.manager.block_pool.num_gpu_blocks - 1  # one is the null block
        self.rules = BlockRules(settings, settings.policy(), self.manager.block_size, pool)
        self.rules.check()
        self._asked: dict[str, RequestSettings] = {}
        self._ignored: dict[str, str] = {}
        self._checks_blocks = wanted()
        self.totals = EngineTotals(self.manager.total)
        self._reporter = FigureReporter(self.totals, metric_labels(vllm_config), logger.info)
        self._queries = self.rules.policy.score.queries if self.rules.policy.score is not None else "none"
        compat.limit_hits(self.kv_cache_manager, self._most_hit)
        compat.publish_until_eviction(self.kv_cache_manager, self.manager.events.__contains__, self._most_hit)
        self._ends_at_states = compat.ends_at_states(self)
        self._records_steps = bool(vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs())

    # ------------------------------------------------------------------ requests

    def add_request(self, request: Any) -> None:
        """Add a request with its events."""
        asked, times = self._events_of(request)
        self._asked[request.request_id] = asked
        self.manager.times[request.request_id] = times
        super().add_request(request)

    def _events_of(self, request: Any) -> tuple[RequestSettings, EventTimes]:
        """Return what a request asks for, and its events.

        If its settings cannot be used, it gets the engine's, and its figures say why: `request_check` refuses most of
        them before, but knows neither the block size nor the prompt.
        """
        prompt, params = request.num_prompt_tokens, request.sampling_params
        if params is None:  # a pooling request
            return RequestSettings(), EventTimes(prompt, self.rules.block, NEVER, 0)
        try:
            asked = RequestSettings.parse(params.extra_args)
            return asked, self.rules.times(prompt, asked)
        except MillpondError as error:
            logger.warning("Request %s keeps the engine's settings: %s", request.request_id, error)
            self._ignored[request.request_id] = str(error)
            return RequestSettings(), self.rules.times(prompt, RequestSettings())

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Free a request that ended, and send its figures with its last output."""
        request_id = request.request_id
        transfer, *rest = super()._free_request(request, *args, **kwargs)
        self._asked.pop(request_id, None)
        times = self.manager.times.pop(request_id, None)
        counts = self.manager.counts.pop(request_id, None) or EvictionCounts()
        ignored = self._ignored.pop(request_id, None)
        if times is None:
            return (transfer, *rest)
        self.totals.ended(times, counts, ignored)
        self._reporter.step()
        figures = request_figures(times, counts, ignored)
        if figures is not None:
            transfer = {**(transfer or {}), KEY: figures}
        return (transfer, *rest)

    # ------------------------------------------------------------------ chunks and hits

    def _most_hit(self, request: Any) -> int:
        """Return the most tokens of a request that may come from the prefix cache.

        Tokens after the first event may not: those blocks belong to a request that never evicted. Queries that the
        event needs are computed.
        """
        times = self.manager.times.get(request.request_id)
        first = NEVER if times is None else times.first()
        if first >= NEVER:
            return NEVER
        if self._queries not in ("none", "window"):
            return 0
        return max(0, first - max(2, self.rules.policy.window))  # see `_reserve_prefill_lookahead`: not one token

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """End a chunk at the next event; vLLM calls this last when it decides the length of a chunk.

        Recurrent layers publish their state only at the end of a chunk, so a chunk ends where a hit on this text ends.
        """
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self._ends_at_states:
            state = self._most_hit(request) // self.block_size * self.block_size
            if num_computed_tokens < state < num_computed_tokens + tokens:
                tokens = state - num_computed_tokens
        times = self.manager.times.get(request.request_id)
        if times is None:
            return tokens
        done = self.manager.events.get(request.request_id, 0)
        until = times.next(max(done, num_computed_tokens) if num_computed_tokens else 0)
        rest = until - num_computed_tokens - tokens
        if self._queries != "none" and until < NEVER:
            # a chunk of one token would run inside a recorded graph, where no query is seen
            if rest == 1 and tokens > 1:
                return tokens - 1
            inside = tokens == 1 and rest > 0 and num_computed_tokens + 1 < request.num_tokens
            if inside and self._records_steps:
                return 0  # the next step has room for more
        return min(tokens, until - num_computed_tokens)

    # ------------------------------------------------------------------ steps

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, after the events of running requests that are due."""
        evictions = self._evict_due()
        output = super().schedule(*args, **kwargs)
        running = {request.request_id for request in self.running}
        orders = StepOrders([one for one in evictions if one.request in running])
        if self.rules.policy.window:
            for request_id, tokens in output.num_scheduled_tokens.items():
                observation = self._observation(request_id, tokens)
                if observation is not None:
                    orders.observations.append(observation)
        if self.rules.policy.sums_prompt:
            parts = (self._part(request_id, tokens) for request_id, tokens in output.num_scheduled_tokens.items())
            orders.parts.extend(part for part in parts if part is not None)
        compat.attach_orders(output, orders)
        if evictions:
            self._reporter.step()
        if self._checks_blocks:
            check_blocks(self.manager, len(self.requests))
        return output

    def shutdown(self) -> None:
        """Shut down, and write the figures since the last line of the log."""
        self._reporter.step()
        self._reporter.say()
        super().shutdown()

    def _evict_due(self) -> list[Eviction]:
        """Evict from running requests that have reached an event; preempt others if no block is free for it."""
        evictions: dict[str, Eviction] = {}
        for request in list(self.running):
            request_id, computed = request.request_id, request.num_computed_tokens
            if not compat.is_running(request) or not self.manager.due(request_id, computed):
                continue
            while compat.is_running(request) and self.manager.free_short(request_id, computed):
                evictions.pop(self._preempt_one(), None)  # it may run again in this very step, from the start
            if not compat.is_running(request):
                continue
            eviction = self.manager.evict(request_id, computed)
            asked = self._asked[request_id]
            evictions[request_id] = replace(eviction, sinks=asked.sinks, keep=asked.keep)
        return list(evictions.values())

    def _preempt_one(self) -> str:
        """Preempt the request that vLLM would preempt first, and return its id."""
        last = compat.preempted_first(self)
        self.running.remove(last)
        self._preempt_request(last, time.monotonic())
        request_id: str = last.request_id
        return request_id

    def _observation(self, request_id: str, tokens: int) -> Observation | None:
        """Return the queries of this step that the next event of a request needs."""
        request, times = self.requests[request_id], self.manager.times.get(request_id)
        if times is None:
            return None
        end = request.num_computed_tokens  # counts this step's already
        begin = end - tokens
        event = times.next(begin) if begin else times.first()
        first = max(begin, event - self.rules.policy.window)
        if event >= NEVER or first >= end:
            return None
        block, blocks = self.rules.block, self.manager.req_to_blocks[request_id]
        slots = [blocks[at // block].block_id * block + at % block for at in range(first, end)]
        return Observation(request_id, first, slots)

    def _part(self, request_id: str, tokens: int) -> StepPart | None:
        """Return a request's tokens of this step; None if no event is ahead of it that it can reach."""
        request, times = self.requests[request_id], self.manager.times.get(request_id)
        if times is None:
            return None
        begin = request.num_computed_tokens - tokens  # which counts this step's already
        if times.next(begin) >= min(NEVER, request.num_prompt_tokens + request.max_tokens):
            return None
        block = self.rules.block
        slot = self.manager.req_to_blocks[request_id][begin // block].block_id * block + begin % block
        return StepPart(request_id, begin, tokens, slot)


class MillpondScheduler(EvictingScheduler):
    """vLLM's scheduler, which evicts."""


class MillpondAsyncScheduler(EvictingScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler, which evicts."""
