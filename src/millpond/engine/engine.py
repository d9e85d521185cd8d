"""An engine that runs many requests inside one memory limit, step by step.

A request first reads its prompt in a cache of its own, in chunks while other requests decode. Then its method plans
what stays, and its answers decode in one batch with all others of the same method, options, budget and format. Each
step is one forward pass of the model over everything that runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch

from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer.host_layer_cache import HostKV
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.batch_plan import BatchPlan
from millpond.engine.components import build
from millpond.engine.config import EngineConfig
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.fault_isolation import FaultIsolation
from millpond.engine.grammar.compiler import Grammar, Grammars
from millpond.engine.integrity import check_engine
from millpond.engine.options import EngineOptions
from millpond.engine.outputs import CacheSnapshot, EngineStats, RequestOutput
from millpond.engine.preemption import Preemptor, groups_of
from millpond.engine.prompt_images import image_reader
from millpond.engine.prompt_start import PromptStart
from millpond.engine.record_steps import record_steps
from millpond.engine.request import Request
from millpond.engine.request_ends import RequestEnds
from millpond.engine.request_state import RequestState
from millpond.engine.request_validation import RequestValidator
from millpond.engine.run_ahead import RunAhead
from millpond.engine.sampling.banned_tokens import Bans
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.scheduler import Step
from millpond.engine.scheduler_request import SchedulerRequest
from millpond.engine.sessions.store import SessionStore
from millpond.engine.step_executor import StepExecutor, names_of
from millpond.engine.transfer.moves import MovingRequests
from millpond.engine.transfer.request_transfer import RequestTransfer
from millpond.errors import OptionError
from millpond.models.weights.streamed import StreamedLayers
from millpond.runner.packed_model import LayerShape
from millpond.setting import shows_options


class Engine(MovingRequests):
    """Runs requests; not safe for several threads at once.

    Args:
        model: A transformers decoder.
        tokenizer: The model's tokenizer; without one requests bring token ids and get no text.
        config: Settings; None for the defaults.
        streamed: Layers of `model` whose weights are read while it runs; the engine closes it.
        tier: Disk for the keys and values of some layers; None: all are in memory. The engine closes it.
        image_processor: Image processor of a model that takes images; without one requests bring pictures.
        host_kv: Layers whose keys and values are in the host's memory while the model is on a device; None: all are
            where the model is.
        **options: Fields of `EngineConfig`, in place of those of `config`.

    Attributes:
        cache: Options of requests that name none.
        cache_factory: Factory of their caches.
        images: Reads images for the model, from any one thread; None: it takes text alone, or there is no processor.
        in_step: Names of the requests in the pass that runs now; safe to read from any thread.
        on_step: Called at the end of each step with the step and its seconds; None: nothing is called.

    Raises:
        UnsupportedModelError, OptionError, BudgetError, CacheMismatchError, DataError: as `compress`.
    """

    #: Whether steps are launched ahead (see `RunAhead`); None: on a GPU with all weights and entries in its memory.
    _runs_ahead: ClassVar[bool | None] = None
    #: Whether steps are recorded at the start (see `record_steps`); None: under the same condition.
    _records_at_start: ClassVar[bool | None] = None

    @shows_options(EngineConfig)
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        streamed: StreamedLayers | None = None,
        tier: DiskTier | None = None,
        image_processor: Any = None,
        host_kv: HostKV | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.config, self.tokenizer = EngineConfig.of(config, options), tokenizer
        with ExitStack() as closing:
            self._parts = parts = build(
                model, tokenizer, self.config, closing, streamed=streamed, tier=tier, host_kv=host_kv
            )
            self._model, self._scheduler, self._sampler = parts.model, parts.scheduler, parts.sampler
            self._requests, self.cache, self.cache_factory = parts.requests, parts.default_cache, parts.cache_factory
            self.images = image_reader(parts.model.images, image_processor, parts.tokenizer)
            self._preemptor, self._validator = Preemptor(parts), RequestValidator(parts)
            self._prompt_start, self._executor = PromptStart(parts), StepExecutor(parts)
            in_memory = streamed is None and tier is None and host_kv is None
            on_cuda = parts.model.device.type == "cuda"
            self._ahead = RunAhead(
                parts,
                self._executor,
                self._preemptor.has_room,
                enabled=on_cuda and in_memory if self._runs_ahead is None else self._runs_ahead,
            )
            if on_cuda and in_memory if self._records_at_start is None else self._records_at_start:
                record_steps(parts)
            self._transfer = RequestTransfer(parts, self._validator)
            self._ends, self._faults = RequestEnds(parts), FaultIsolation(parts)
            self._changed_outside_step: list[RequestState] = []
            self.in_step: tuple[str, ...] = ()
            self.on_step: Callable[[Step, float], None] | None = None
            self._stats = self._parts.stats()
            self._closing = closing.pop_all()

    # ------------------------------------------------------------------ requests

    @property
    def layers(self) -> list[LayerShape]:
        """What each layer of the model stores."""
        return self._model.layers

    @property
    def context_length(self) -> int | None:
        """Tokens of a prompt and its answer together; None where the model sets no limit."""
        return self._model.context_length

    @property
    def text_limit(self) -> int | None:
        """The context length; None where texts continue beyond the context (`overflow="rolling"`)."""
        return None if self.config.overflow == "rolling" else self.context_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids: those below it are tokens."""
        return self._model.vocabulary

    @property
    def sessions(self) -> SessionStore | None:
        """Caches of finished turns on the disk, safe to use from any thread; None: none are stored."""
        return None if self._parts.sessions is None else self._parts.sessions.store

    @property
    def codes(self) -> str | None:
        """Mark of the codes in which its requests move and its turns are stored: storage codec and transform.

        None: they do so as they are.
        """
        codec = self._parts.sequence_codec
        return None if codec is None else codec.kept.mark  # it names parts of single heads too

    @property
    def grammars(self) -> Grammars:
        """Compiler of the rules that answers can be made to follow; compiles from any thread."""
        return self._sampler.grammars

    def bans_of(self, params: SamplingParams) -> Bans | None:
        """Return the tokens that `params` forbid, from any thread; None: none.

        Raises:
            OptionError: see `Bans.of`.
        """
        return self._sampler.bans_of(params)

    def check(self, request: Request) -> None:
        """Check a request without adding it: raises what `add` would raise."""
        self._requests.check_names([request.request_id])
        self._validator.validate(request)

    def require_breakpoints(self, request: Request) -> None:
        """Check that later prompts can continue from the breakpoints of a request.

        Raises:
            OptionError: the request has breakpoints, and no later prompt could continue from them; the message says
                why.
        """
        self._validator.require_breakpoints(request)

    def add(self, request: Request, grammar: Grammar | None = None, bans: Bans | None = None) -> None:
        """Add a request; `step` works on it.

        Only what can never run is refused; the scheduler decides when the request starts. A cluster also adds requests
        again whose worker it lost: it has accepted them, so what refuses by load must let them pass.

        Args:
            request: The request.
            grammar: Result of `grammars` for its parameters; None: compiled here, while the caller waits.
            bans: Result of `bans_of` for its parameters; None: made here, while the caller waits.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: the request is refused; the message says why.
        """
        self._requests.check_names([request.request_id])
        state = self._validator.validate(request)
        self._enqueue(state, grammar or self.grammars.of(request.params), bans or self.bans_of(request.params))
        self._stats = self._parts.stats()

    def plan_batch(self, requests: Sequence[Request], levels: int | None = None) -> BatchPlan:
        """Return the plan of `add_batch` for requests of one method, budget and format.

        Nothing runs.

        Args:
            requests: The requests.
            levels: Levels of common beginnings, see `millpond.engine.batch_plan.plan_batch`.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: see `add`.
        """
        states = [self._validator.validate(request) for request in requests]
        return self._parts.shared_prefixes.plan(states, levels)

    def add_batch(self, requests: Sequence[Request], levels: int | None = None) -> None:
        """Add requests that are known together; beginnings that several share are read once.

        They begin in the order of the plan. Requests share with those of the same method, budget, format and salt.

        Args:
            requests: The requests.
            levels: Levels of common beginnings, see `millpond.engine.batch_plan.plan_batch`.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: a request is refused, or the engine is deterministic; none
                was added.
        """
        if self.config.deterministic:
            raise OptionError(
                "a planned batch cuts prompts where they part, which moves bits; add requests one by one, or leave out "
                "deterministic=True"
            )
        self._requests.check_names([request.request_id for request in requests])
        states = [self._validator.validate(request) for request in requests]
        rules = {
            state: (self.grammars.of(state.request.params), self.bans_of(state.request.params)) for state in states
        }
        self._parts.shared_prefixes.add_planned(states, levels, lambda state: self._enqueue(state, *rules[state]))
        self._stats = self._parts.stats()

    def _enqueue(self, state: RequestState, grammar: Grammar | None, bans: Bans | None) -> None:
        request = state.request
        for completion in state.completions:
            index = completion.index
            known = request.known[index] if request.known else ()
            self._sampler.start(completion.key, request.params, state.ids, index, grammar, bans, known=known)
        self._requests.add(state)
        self._scheduler.add(state.scheduled)
        for loads in self._parts.file_loads:
            loads.add(state)

    def cancel(self, request_id: str) -> None:
        """End a request with what it has; one that has ended already is no error."""
        state = self._requests.get(request_id)
        if state is not None:
            self._ends.end(state, "cancelled")
            self._changed_outside_step.append(state)
            if not self._requests:
                self._ahead.drop()
            self._stats = self._parts.stats()

    @property
    def busy(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._requests or self._changed_outside_step)

    @property
    def idle_s(self) -> float | None:
        """Seconds until `tidy` has something to do while no request is in flight; None: nothing."""
        return self._parts.prefix_cache.due_s

    def tidy(self) -> None:
        """Do what waits for a moment without requests: blocks that nobody uses are coded."""
        self._parts.prefix_cache.advance()
        self._parts.trim()
        self._stats = self._parts.stats()

    def drain(self) -> list[RequestOutput]:
        """Step until no request is left, and return the last output of each."""
        finished_outputs: list[RequestOutput] = []
        while self.busy:
            finished_outputs += [output for output in self.step() if output.finished]
        return finished_outputs

    def abort_all(self, error: Exception | None = None) -> list[RequestOutput]:
        """End all requests, cancelled or because of an error, and return their last outputs."""
        ended = dict.fromkeys([*self._changed_outside_step, *(state for state in self._requests if state.completions)])
        self._changed_outside_step = []
        self._ahead.drop()
        for state in list(self._requests):
            if error is None:
                self._ends.end(state, "cancelled")
            else:
                state.fail(error)
                self._ends.retire(state)
        self._parts.trim()
        self._stats = self._parts.stats()
        return [state.to_output() for state in ended]

    def close(self) -> None:
        """End all requests, free all memory, and give the model its own attention back."""
        self.abort_all()
        self.grammars.close()
        self._parts.prefix_cache.clear()
        self._parts.trim()
        self._stats = self._parts.stats()
        self._closing.close()

    # ------------------------------------------------------------------ what it holds

    def cache_of(self, request_id: str, index: int = 0) -> tuple[BatchCache, int] | None:
        """Return the cache that holds an answer and the index of its sequence, or None.

        Its contents are right until the next step. None: no cache holds the answer.

        Args:
            request_id: Name of the request.
            index: Number of the answer.
        """
        self._settle()
        state = self._requests.get(request_id)
        return None if state is None else state.cache(index)

    def memory(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """Return the entries that a layer holds of a request's first answer.

        They are those of now, or of its end if it was watched. None: it has not begun, is swapped out, or has been
        forgotten.

        Args:
            request_id: Name of the request.
            layer: Index of the layer.
            client: The client that reads it; a request of another client counts as unknown. None: any client.

        Raises:
            OptionError: there is no such layer.
        """
        self._settle()
        state, snapshots = self._requests.get(request_id), self._parts.snapshots
        if state is not None and client not in (None, state.request.client):
            return None
        snapshot = None if state is None else snapshots.now(state, layer)
        return snapshots.of(request_id, layer, client) if snapshot is None else snapshot

    def stats(self) -> EngineStats:
        """Return the figures of the engine after its last step; safe to call from any thread."""
        store = self.sessions  # turns are written between two steps too
        return self._stats if store is None else replace(self._stats, sessions=store.stats())

    def check_integrity(self) -> None:
        """Assert that every page is held by exactly the caches that name it, within the limit."""
        check_engine(self._parts)

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """Run one forward pass, and return the requests that changed, as far as they are.

        The tokens of a pass may come with the next call (see `millpond.engine.run_ahead`). An error in one request ends
        it, and the others continue.

        Raises:
            Exception: a pass failed for several requests, and then for each of them alone; only `abort_all` may follow.
        """
        changed, self._changed_outside_step = self._changed_outside_step, []
        for scheduled in self._begin_step():
            changed.append(state := self._requests[scheduled.key])
            self._ends.end(state, "deadline")
        for loads in self._parts.file_loads:
            loads.advance()
        began = time.perf_counter()
        step = self._scheduler.plan()
        if not self._ahead.follows(step):
            changed += self._read_pending(step)
        for state in self._requests:
            state.move_group()
        suspect = self._faults.isolate(step)
        self._preemptor.lost += self._prompt_start.attach_prefixes(step)
        step.prefills = [(scheduled, n) for scheduled, n in step.prefills if not self._requests[scheduled.key].failed]
        groups, reading = self._batches_of(step)
        try:
            self._preemptor.prepare(step)
            changed += self._ends.retire_all(self._preemptor.pop_lost())
            groups, reading = self._batches_of(step)
            is_free = self._faults.is_free(suspect, groups, dict(reading))
            if groups or reading:
                self.in_step = names_of(groups, reading)
                if self._ahead.takes(step):
                    advanced = self._ahead.launch(groups, step)
                    changed += advanced
                else:
                    changed += self._reached(groups, reading)
                    advanced = self._executor.run(groups, reading)
                    changed += [state for state in advanced if state.failed and state.completions]
                changed += [state for state, _ in reading if state.request.tell_read]
                self._ends.collect_finished(advanced)
                if is_free and suspect is not None:
                    self._faults.passed(suspect)
                self._end_step(step, time.perf_counter() - began)
            elif not changed:
                for loads in self._parts.file_loads:
                    loads.wait()
                self._parts.prefix_cache.wait()
        except Exception as error:
            advanced = self._ahead.settle(step)
            changed += [*advanced, *self._fail_step(groups, reading, error)]
            self._ends.collect_finished([state for state in advanced if self._requests.holds(state)])
            if self._faults.fatal:
                self._changed_outside_step += changed
                raise
        finally:
            self.in_step = ()
        self._parts.prefix_cache.release_unheld()
        self._parts.prefix_cache.advance(time.perf_counter() - began if self._requests else None)
        if not self._requests:
            self._parts.trim()
        self._stats = self._parts.stats()
        outputs = [state.to_output() for state in dict.fromkeys(changed) if not state.replaying]
        if self.on_step is not None and (groups or reading):
            self.on_step(step, time.perf_counter() - began)
        return outputs

    def _take_stats(self) -> None:
        self._stats = self._parts.stats()

    def _begin_step(self) -> list[SchedulerRequest]:
        """Return the requests that end now by their deadline."""
        return self._scheduler.expired(time.monotonic())

    def _end_step(self, step: Step, seconds: float) -> None:
        """Take note of how long a pass took, by which later steps are shared out among clients."""
        self._scheduler.record_step_time(step, seconds)

    def _read_pending(self, step: Step) -> list[RequestState]:
        """Read the pending step before another one, and return the requests with tokens."""
        advanced = self._ahead.settle(step)
        self._ends.collect_finished(advanced)
        self._scheduler.leave_out_ended(step)
        return advanced

    def _settle(self) -> None:
        """Read the pending step, as a cache is looked at between two steps.

        The next step reports its tokens.
        """
        advanced = self._ahead.settle()
        self._ends.collect_finished(advanced)
        self._changed_outside_step += advanced
        self._take_stats()

    def _reached(self, groups: list[DecodeGroup], reading: list[tuple[RequestState, int]]) -> list[RequestState]:
        """Return the requests that get tokens of a pass.

        They decode, or their prompts end with it.
        """
        decoding = [self._requests.owner(completion) for group in groups for completion in group.completions]
        return decoding + [
            state
            for state, n in reading
            if state.completions and state.scheduled.num_computed_tokens + n == state.scheduled.num_prompt_tokens
        ]

    def _batches_of(self, step: Step) -> tuple[list[DecodeGroup], list[tuple[RequestState, int]]]:
        """Return the batches that decode in a step, and the requests to read with their tokens."""
        reading = [(self._requests[scheduled.key], n) for scheduled, n in step.prefills if scheduled.is_running]
        return groups_of(step, self._requests), reading

    def _fail_step(
        self, groups: list[DecodeGroup], reading: list[tuple[RequestState, int]], error: Exception
    ) -> list[RequestState]:
        """Handle a failed pass, and return the requests that have ended because of it."""
        ended_states = self._faults.failed(groups, [state for state, _ in reading], error)
        retired_states = self._ends.retire_all([state for state in self._requests if state.failed])
        return list(dict.fromkeys([*(state for state in ended_states if state.completions), *retired_states]))
