"""An engine that runs many requests inside one memory limit, step by step.

A request first reads its prompt in a cache of its own, in chunks while other requests decode. Then its method plans
what stays, and its answers decode in one batch with all others of the same method, options, budget and format. Each
step is one forward pass of the model over everything that runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch

from millpond.cache.batch_cache import BatchCache
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.paging.choose import rule_named
from millpond.cache.swap import SwapFiles
from millpond.cache.tiered.block_store import BlockStore
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.codec import codecs_of, resolve
from millpond.engine.batch_plan import BatchPlan
from millpond.engine.cache_snapshots import SnapshotStore
from millpond.engine.chunks.loaded import LoadedChunks
from millpond.engine.chunks.reuse import ChunkLoadSource, ChunkReuse, model_mark
from millpond.engine.config import EngineConfig, EngineOptions, takes_engine_options
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.disk_conflicts import check_disk
from millpond.engine.fault_isolation import FaultIsolation
from millpond.engine.file_loads import FileLoads
from millpond.engine.grammar.compiler import Grammar, Grammars
from millpond.engine.group_registry import GroupRegistry
from millpond.engine.integrity import check_pages, check_untainted
from millpond.engine.outputs import CacheSnapshot, EngineStats, RequestOutput
from millpond.engine.preemption import Preemptor, groups_of
from millpond.engine.prefix_sharing import PrefixSharing
from millpond.engine.prefix_store import open_prefix_store
from millpond.engine.request import CacheOptions, Request
from millpond.engine.request_ends import RequestEnds
from millpond.engine.request_state import RequestState
from millpond.engine.request_table import RequestTable
from millpond.engine.request_validation import RequestValidator
from millpond.engine.sampling.banned_tokens import Bans
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.sampler import Sampler
from millpond.engine.scheduler import Scheduler, State, Step
from millpond.engine.sessions.reuse import SessionReuse, check_continues
from millpond.engine.sessions.store import DEFAULT_DISK, SessionStore
from millpond.engine.sessions.stored_turn import session_mark
from millpond.engine.step_executor import StepExecutor
from millpond.engine.transfer.request_snapshot import RequestSnapshot
from millpond.engine.transfer.request_transfer import RequestTransfer
from millpond.engine.trunks import Trunks
from millpond.errors import OptionError
from millpond.hf.calibration.load import loaded
from millpond.hf.document import fingerprint
from millpond.hf.key_biases import loses_by_bias, warn_of_bias
from millpond.hf.model_support import unwrapped
from millpond.models.weights.streamed import StreamedLayers
from millpond.runner.packed_model import LayerShape, PackedModel

#: Whether a request left an engine or came into it.
Direction = Literal["out", "in"]


class Engine:
    """Runs requests; not safe for several threads at once.

    Args:
        model: a transformers decoder. tokenizer: its own; without one requests bring token ids and get no text.
        config: settings; None for the defaults.
        streamed: the layers of `model` where their weights are read while it runs; the engine closes it.
        tier: where keys and values of some layers lie on a disk; None: in memory. The engine closes it.
        **options: fields of `EngineConfig`, in place of those of `config`.

    Attributes:
        cache: of requests that name none. recipe: how their caches are stored.
        in_step: names of the requests in the pass that runs now; safe to read from any thread.
        watch: called at the end of each step with what it did, and its seconds; None: nothing is.
        watch_moves: called when a request was handed or taken over, with its name, the tokens of its prompt and the
            seconds; likewise.

    Raises:
        UnsupportedModelError, OptionError, BudgetError, CacheMismatchError, DataError: as `compress`.
    """

    @takes_engine_options
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        streamed: StreamedLayers | None = None,
        tier: DiskTier | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.config = config = EngineConfig.of(config, options)
        limit = config.kv_limit
        self.tokenizer, self._tier = tokenizer, tier
        check_disk(config, streamed, tier)
        whole_mark = None if config.cache_dir is None else session_mark(model, config.weights)
        mark = None if config.chunk_store is None else model_mark(model, config.weights)
        self._account = MemoryLimit(limit, pinned=tier is not None)
        self._scheduler = Scheduler(
            limit,
            step_tokens=config.max_step_tokens,
            most_running=config.max_running,
            overcommit=config.overcommit,
            prompt_block=config.prompt_block,
            spread=config.spread_ages,
        )
        self._model_mark = None if config.weights is None else f"{config.weights} {fingerprint(unwrapped(model))}"
        self._model = PackedModel(
            model,
            runner=config.runner,
            native_layers=config.native_layers,
            streamed=streamed,
            weights=config.weights,
            deterministic=config.deterministic,
        )
        self._model.limit_context(config.max_model_len)
        self._sampler = Sampler(tokenizer, self._model.end_tokens)
        self._memories = SnapshotStore(self._model.layers)
        self._requests = RequestTable()
        self._told: list[RequestState] = []  # requests that changed outside a step
        self._files: SwapFiles | None = None
        self._prefixes: BlockStore | None = None
        self._chunks: ChunkReuse | None = None
        self._sessions: SessionReuse | None = None
        self._loads: list[FileLoads[Any]] = []  # what requests may wait for
        chunk_loads: FileLoads[LoadedChunks] | None = None
        try:
            if config.chunk_store is not None and mark is not None:
                self._chunks = ChunkReuse(config.chunk_store, self._model, mark)
                if config.chunk_store.folder is not None:
                    chunk_loads = FileLoads(ChunkLoadSource(self._chunks))
                    self._loads.append(chunk_loads)
            self._files = None if config.swap_to is None else SwapFiles(config.swap_to)
            self._prefixes = open_prefix_store(config)
            self._sharing = PrefixSharing(
                self._account,
                self._model.layers,
                rule_named(config.prefix_cache, config.pager),
                config.prompt_block or 1,
                self._prefixes,
            )
            choice = config.choice.on([(layer.key_dim, layer.value_dim) for layer in self._model.layers])
            defaults = CacheOptions(
                method=choice.method,
                options=config.options,
                budget=choice.budget,
                codec=choice.codec,
                max_kl=config.max_kl,
            )
            self._recipes = GroupRegistry(
                self._model,
                defaults,
                self._account,
                config.page_slots,
                tokenizer,
                loaded(config.calibration),
                tier,
                config.reach(self.context_length),
                config.fit,
                named=not choice.usual,
                floor=config.budget_floor,
            )
            usual = self._recipes.complete(CacheOptions())
            self.recipe = recipe = self._recipes.group(usual).recipe
            for one in filter(loses_by_bias, codecs_of(resolve(choice.codec))):
                warn_of_bias(one, self._model.model)
            if whole_mark is not None and config.cache_dir is not None:
                check_continues(recipe, choice.method)
                store = SessionStore(config.cache_dir, config.cache_disk or DEFAULT_DISK)
                sharing = self._sharing
                self._sessions = SessionReuse(store, self._model, whole_mark, sharing.has, sharing.known_tokens)
                self._loads.append(self._sessions.loads)
            self.cache = replace(usual, budget=recipe.budget) if usual.budget is None else usual
        except BaseException:
            self._let_go()
            raise
        self._trunks = Trunks(self._account, self._scheduler, self._requests, self._model.layers)
        self._room = Preemptor(
            self._scheduler, self._requests, self._model.layers, self._sharing, self._trunks, self._files, tier
        )
        self._intake = RequestValidator(
            self._model,
            self._recipes,
            self._account,
            self._scheduler,
            self._sampler,
            tokenizer,
            self._chunks,
            bool(config.prefix_cache),
            config.on_pressure,
        )
        self._turn = StepExecutor(
            self._model,
            self._scheduler,
            self._sampler,
            self._sharing,
            self._trunks,
            self._requests,
            tokenizer,
            self._chunks,
            chunk_loads,
            self._sessions,
        )
        self._transfer = RequestTransfer(
            self._model,
            self._fingerprint,
            self._scheduler,
            self._sampler,
            self._sharing,
            self._intake,
            tokenizer,
            self._files,
        )
        self._ends = RequestEnds(
            self._scheduler,
            self._sampler,
            self._requests,
            self._trunks,
            self._loads,
            self._memories,
            self._sessions,
            tier,
        )
        self._faults = FaultIsolation(self._scheduler, self._requests, self._trunks, self._loads, self._model.layers)
        self.in_step: tuple[str, ...] = ()
        self.watch: Callable[[Step, float], None] | None = None
        self.watch_moves: Callable[[Direction, str, int, float], None] | None = None
        self._stats = self._count()

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
        """The same, or None where texts go on beyond the context (`overflow="rolling"`)."""
        return None if self.config.overflow == "rolling" else self.context_length

    @property
    def vocab_size(self) -> int:
        """Ids below it are tokens."""
        return self._model.vocabulary

    @property
    def sessions(self) -> SessionStore | None:
        """Caches of finished turns on the disk, safe to use from any thread; None: none are stored."""
        return None if self._sessions is None else self._sessions.store

    @property
    def grammars(self) -> Grammars:
        """What answers can be made to follow; compiles from any thread."""
        return self._sampler.grammars

    def bans_of(self, params: SamplingParams) -> Bans | None:
        """The tokens that `params` forbid, from any thread; None: none.

        Raises:
            OptionError: see `Bans.of`.
        """
        return self._sampler.bans_of(params)

    def check(self, request: Request) -> None:
        """Raises what `add` would raise of a request, and takes nothing in."""
        self._check_name(request.request_id)
        self._intake.validate(request)

    def require_breakpoints(self, request: Request) -> None:
        """
        Raises:
            OptionError: the request has breakpoints, and no later prompt could go on from them; the message says why.
        """
        self._intake.require_breakpoints(request)

    def add(self, request: Request, grammar: Grammar | None = None, bans: Bans | None = None) -> None:
        """Take a request in; `step` works on it.

        Args:
            grammar, bans: what `grammars` and `bans_of` made of its parameters; None: made here, and the caller waits.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: the request is refused; the message says why.
        """
        self._check_name(request.request_id)
        live = self._intake.validate(request)
        params = request.params
        self._take_in(live, grammar or self.grammars.of(params), bans or self.bans_of(params))
        self._stats = self._count()

    def hand_over(self, request_id: str) -> bytes:
        """End a request here and return all that another engine needs to continue it: see `take_over`.

        A request whose prompt is still being read is sent without its cache, and read again there. Pages are free
        afterwards.

        Returns:
            One safetensors buffer with a checksum: request, tokens, seeds, entries. No pages, so that engines with
            pages of different sizes understand each other.

        Raises:
            OptionError: no such request, keys and values on a disk, or options of the method that name files.
            PoolFullError: it is swapped out and there is no room to read its pages. DataError: their file is broken.
            In all cases the request stays as it is.
        """
        began = time.perf_counter()
        live = self._requests.get(request_id)
        if live is None or live.job.trunk:
            raise OptionError(f"no request {request_id!r} is in flight; it has ended, or was never added")
        data = self._transfer.to_bytes(live)
        self._ends.handed_over(live)
        if not self._requests:
            self._trim()
        self._stats = self._count()
        if self.watch_moves is not None:
            self.watch_moves("out", request_id, live.job.prompt, time.perf_counter() - began)
        return data

    def checkpoint(self, request_id: str) -> bytes | None:
        """A copy of a request that decodes, from which `take_over` continues it; it goes on here.

        Returns:
            As `hand_over`; None: it is not in flight, its prompt is being read, or it is swapped out.

        Raises:
            OptionError: keys and values on a disk, or options of the method that name files.
        """
        live = self._requests.get(request_id)
        if live is None or live.job.trunk or live.stack is not None or live.job.read < live.job.prompt:
            return None
        return self._transfer.to_bytes(live) if live.unfinished else None

    def take_over(self, data: bytes | bytearray | memoryview, request: Request | None = None) -> str:
        """Continue a request of another engine with the same model, with the tokens that it would have had there.

        Args:
            data: from `hand_over`, or from `checkpoint`.
            request: the same request under its present name, with its deadline and the tokens that are known by now;
                those that came after the copy are fed and not drawn. None: as it was copied.

        Returns:
            Name of the request.

        Raises:
            DataError: bytes that are cut off or changed, or hold what no request has.
            CacheMismatchError: another model, or another method, budget, codec or calibration than here.
            PoolFullError: there is no room now. OptionError, BudgetError, UnsupportedModelError: as `add`. In all
            cases nothing is left behind.
        """
        began = time.perf_counter()
        snapshot = RequestSnapshot.from_bytes(data)
        if request is not None:
            snapshot = snapshot.continued_as(request)
        live = self._transfer.take(snapshot, self._requests.__contains__)
        self._requests.add(live)
        if live.stack is None and not live.job.read:
            for loads in self._loads:
                loads.add(live)
        self._stats = self._count()
        if self.watch_moves is not None:
            self.watch_moves("in", live.request.request_id, live.job.prompt, time.perf_counter() - began)
        return live.request.request_id

    def plan_batch(self, requests: Sequence[Request], levels: int | None = None) -> BatchPlan:
        """What `add_batch` does with requests of one method, budget and format; runs nothing.

        Args:
            levels: see `millpond.engine.batch_plan.plan_batch`.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: see `add`.
        """
        return self._trunks.plan([self._intake.validate(request) for request in requests], levels)

    def add_batch(self, requests: Sequence[Request], levels: int | None = None) -> None:
        """Take requests in that are known together: beginnings that several have in common are read once.

        They begin in the order of the plan. Requests share with those of the same method, budget, format and salt.

        Args:
            levels: see `millpond.engine.batch_plan.plan_batch`.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: a request is refused; none was taken in. OptionError: the
            engine is deterministic.
        """
        if self.config.deterministic:
            raise OptionError(
                "a planned batch cuts prompts where they part, which moves bits; add requests one by one, or leave out "
                "deterministic=True"
            )
        names = [request.request_id for request in requests]
        for name, times in Counter(names).items():
            if times > 1:
                raise OptionError(f"{times} requests of a batch are named {name!r}; give each a name of its own")
            self._check_name(name)
        lives = [self._intake.validate(request) for request in requests]
        rules = {live: (self.grammars.of(live.request.params), self.bans_of(live.request.params)) for live in lives}
        self._trunks.add_planned(lives, levels, lambda live: self._take_in(live, *rules[live]))
        self._stats = self._count()

    def _check_name(self, name: str) -> None:
        if name in self._requests:
            raise OptionError(f"request {name!r} is in flight already; give another name")

    def _take_in(self, live: RequestState, grammar: Grammar | None, bans: Bans | None) -> None:
        for answer in live.answers:
            known = live.request.known[answer.index] if live.request.known else ()
            self._sampler.start(answer.key, live.request.params, live.ids, answer.index, grammar, bans, known=known)
        self._requests.add(live)
        self._scheduler.add(live.job)
        for loads in self._loads:
            loads.add(live)

    def cancel(self, request_id: str) -> None:
        """End a request with what it has; one that is not there any more is no error."""
        live = self._requests.get(request_id)
        if live is not None:
            self._ends.end(live, "cancelled")
            self._told.append(live)
            self._stats = self._count()

    @property
    def busy(self) -> bool:
        """Whether a step would do or tell anything."""
        return bool(self._requests or self._told)

    def cache_of(self, request_id: str, index: int = 0) -> tuple[BatchCache, int] | None:
        """The caches that hold an answer, and which of their sequences it is; None while it holds none.

        What is read there is right until the next step.
        """
        live = self._requests.get(request_id)
        return None if live is None else live.cache(index)

    def memory(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """What a layer remembers of a request's first answer now; or when it ended, if it was watched.

        None: it has not begun, lies outside the pool, or nothing is known of it any more.

        Args:
            client: who asks; a request of another client is as one that is not known. None: whoever sent it.

        Raises:
            OptionError: there is no such layer.
        """
        live = self._requests.get(request_id)
        if live is not None and client not in (None, live.request.client):
            return None
        found = None if live is None else self._memories.now(live, layer)
        return self._memories.of(request_id, layer, client) if found is None else found

    def stats(self) -> EngineStats:
        """The engine after its last step; safe to call from any thread."""
        store = self.sessions
        return self._stats if store is None else replace(self._stats, sessions=store.stats())

    def drain(self) -> list[RequestOutput]:
        """Step until nothing is left; returns what each request came to."""
        done: list[RequestOutput] = []
        while self.busy:
            done += [output for output in self.step() if output.finished]
        return done

    def end_all(self, error: Exception | None = None) -> list[RequestOutput]:
        """End all requests, cancelled or because of an error; returns what they came to."""
        ended = list(dict.fromkeys([*self._told, *(live for live in self._requests if live.answers)]))
        self._told = []
        for live in list(self._requests):
            if error is None:
                self._ends.end(live, "cancelled")
            else:
                live.fail(error)
                self._ends.tidy(live)
        self._trim()
        self._stats = self._count()
        return [live.to_output() for live in ended]

    def close(self) -> None:
        """End all requests, give all memory back, and the model its own attention."""
        self.end_all()
        self.grammars.close()
        self._sharing.tree.clear()
        self._trim()
        self._stats = self._count()
        self._let_go()

    def check_integrity(self) -> None:
        """Assert that every page is held by exactly the caches that name it, within the limit."""
        groups = dict.fromkeys([*self._recipes.groups, *(live.group for live in self._requests)])
        stacks = [group.stack for group in groups]
        stacks += [live.stack for live in self._requests if live.stack is not None]
        check_pages(self._account, stacks, self._sharing.tree)
        tainted = [found for live in self._requests if live.tainted and (found := live.cache()) is not None]
        check_untainted(tainted, self._sharing.tree)

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """One forward pass; returns the requests that changed, as far as they have come.

        Whatever goes wrong with one request ends it, and the others go on.

        Raises:
            Exception: a pass failed for several requests, and then for each of them alone; only `end_all` may follow.
        """
        changed, self._told = self._told, []
        for job in self._scheduler.expired(time.monotonic()):
            changed.append(live := self._requests[job.key])
            self._ends.end(live, "deadline")
        for loads in self._loads:
            loads.advance()
        began = time.perf_counter()
        step = self._scheduler.plan()
        for live in self._requests:
            live.regroup()
        alone = self._faults.isolate(step)
        self._room.lost += self._turn.share(step)
        step.chunks = [(job, n) for job, n in step.chunks if not self._requests[job.key].failed]
        groups, reading = self._parts(step)
        try:
            self._room.prepare(step)
            changed += self._part_with_lost()
            groups, reading = self._parts(step)
            free = self._faults.is_free(alone, groups, dict(reading))
            changed += [self._requests.owner(answer) for group in groups for answer in group.answers]
            changed += [live for live, n in reading if live.answers and live.job.read + n == live.job.prompt]
            if groups or reading:
                self.in_step = _names(groups, reading)
                new = self._turn.run(groups, reading)
                changed += [live for live in new if live.failed and live.answers]
                changed += [live for live, _ in reading if live.request.tell_read]
                self._ends.forget(new)
                if free and alone is not None:
                    self._faults.passed(alone)
                self._scheduler.took_seconds(step, time.perf_counter() - began)
            elif not changed:
                for loads in self._loads:
                    loads.wait()
        except Exception as error:
            changed += self._break_off(groups, reading, error)
            if self._faults.fatal:
                self._told += changed
                raise
        finally:
            self.in_step = ()
        if not self._requests:
            self._trim()
        self._stats = self._count()
        outputs = [live.to_output() for live in dict.fromkeys(changed) if not live.replaying]
        if self.watch is not None and (groups or reading):
            self.watch(step, time.perf_counter() - began)
        return outputs

    def _parts(self, step: Step) -> tuple[list[DecodeGroup], list[tuple[RequestState, int]]]:
        """The batches that decode in a step, and the requests that are read, with how many of their tokens."""
        reading = [(self._requests[job.key], n) for job, n in step.chunks if job.running]
        return groups_of(step, self._requests), reading

    # ------------------------------------------------------------------ ends

    def _break_off(
        self, groups: list[DecodeGroup], reading: list[tuple[RequestState, int]], error: Exception
    ) -> list[RequestState]:
        """A pass failed; returns the requests that have ended because of it."""
        ended = self._faults.failed(groups, [live for live, _ in reading], error)
        gone = [live for live in self._requests if live.failed]
        self._ends.tidy_all(gone)
        return [live for live in dict.fromkeys([*ended, *gone]) if live.answers]

    def _part_with_lost(self) -> list[RequestState]:
        """End the requests whose caches found no way out of the pool, or back."""
        lost, self._room.lost = self._room.lost, []
        self._ends.tidy_all(lost)
        return [live for live in lost if live.answers]

    def _fingerprint(self) -> str:
        if self._model_mark is None:
            self._model_mark = fingerprint(self._model.model)
        return self._model_mark

    def _let_go(self) -> None:
        for loads in self._loads:
            loads.close()
        self._model.close()
        if self._sessions is not None:
            self._sessions.store.close()
        if self._files is not None:
            self._files.close()
        for on_disk in (self._tier, self._prefixes):
            if on_disk is not None:
                on_disk.close()

    def _trim(self) -> None:
        for pool in self._account.pools:
            pool.trim()

    def _count(self) -> EngineStats:
        scheduler = self._scheduler
        figures = [answer.kv for answer in self._requests.unfinished if answer.kv is not None]
        of_states = self._recipes.state_bytes
        return EngineStats(
            running=scheduler.count(State.READING, State.DECODING),
            waiting=scheduler.count(State.WAITING),
            swapped=scheduler.count(State.SWAPPED),
            kv_bytes=self._account.live_bytes - of_states,
            kv_reserved=self._account.nbytes,
            kv_limit=self._account.limit_bytes,
            kv_saved=sum(kv.full_kv_bytes - kv.kv_bytes for kv in figures),
            preemptions=self._room.n_preempted,
            finished=self._ends.finished,
            evicted_entries=self._ends.evicted,
            state_bytes=of_states,
            weight_bytes=self._model.weight_bytes,
            prefix=self._sharing.stats(),
            chunks=None if self._chunks is None else self._chunks.store.stats(),
            sessions=None,
            **self._turn.counts,  # `stats` adds them: turns are written between two steps too
        )


def _names(groups: Sequence[DecodeGroup], reading: Sequence[tuple[RequestState, int]]) -> tuple[str, ...]:
    """Those of the requests of a pass, trunks left out."""
    decoding = (answer.key[0] for group in groups for answer in group.answers)
    return tuple(dict.fromkeys([*decoding, *(live.request.request_id for live, _ in reading if live.answers)]))
