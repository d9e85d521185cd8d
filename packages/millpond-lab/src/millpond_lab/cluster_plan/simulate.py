"""A simulation of workers that run the engine's own scheduler on modelled step times, and its requests."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millpond.cluster.router import DECODING
from millpond.engine.async_llm import CALLS_SHARE
from millpond.engine.scheduler import Scheduler, Step
from millpond.engine.scheduler_request import MemoryNeed, SchedulerRequest
from millpond.errors import OptionError
from millpond_lab.cluster_plan.layout import CacheSize, ClusterLayout, Link, WorkerPlan
from millpond_lab.cluster_plan.profile import StepLoad


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        at: seconds from the first one. num_prompt_tokens, output: tokens, at least 1 each.
    """

    at: float
    prompt: int
    output: int


def sample(lengths: Sequence[tuple[int, int]], count: int, rate: float, seed: int) -> list[PlannedRequest]:
    """`count` of the given lengths without repetition, arriving independently at `rate` per second.

    The lengths and the gaps of a seed are those of DistServe's simulator (`random.sample` and exponential gaps of
    NumPy's older generator; the first request comes at 0), so that its table can be checked.

    Args:
        lengths: (prompt, output) tokens of a trace.

    Raises:
        OptionError: fewer lengths than requests, or a rate that is not above 0.
    """
    if not 0 < count <= len(lengths):
        raise OptionError(f"{count} requests: the trace has {len(lengths):,} usable ones; ask for 1 to as many")
    if not 0 < rate < float("inf"):
        raise OptionError(f"rate={rate:g} requests per second must be above 0")
    chosen = random.Random(seed).sample(list(lengths), count)
    gaps = np.random.RandomState(seed).gamma(1.0, 1 / rate, size=count - 1)
    times = [0.0, *np.cumsum(gaps).tolist()]
    return [PlannedRequest(at, prompt, output) for at, (prompt, output) in zip(times, chosen, strict=True)]


#: Share of a worker's memory that caches which it fetches may take before they decode.
WAITING_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of one request.

    Attributes:
        ttft: seconds to the first token. tpot: seconds per token after it; None for an answer of one token.
        moved: bytes that went from worker to worker.
    """

    ttft: float
    tpot: float | None
    moved: int = 0

    def meets(self, ttft: float, tpot: float) -> bool:
        """Whether both service levels, in seconds, are met."""
        return self.ttft <= ttft and (self.tpot is None or self.tpot <= tpot)


@dataclass(frozen=True, slots=True)
class MissLimit:
    """When a simulation need not go on: more than `peak` levels, in seconds, were missed."""

    ttft: float
    tpot: float
    most: int


@dataclass(slots=True, eq=False)
class _SimulatedRequest:
    """A request under way: tokens of its answer, when the first and the last came, and what was moved."""

    key: str
    request: PlannedRequest
    done: int = 0
    first: float = -1.0
    last: float = -1.0
    moved: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker: its scheduler, what is under way in it, and the caches that wait to leave it or to come.

    One with a pipeline is as many of these as it has stages, each with its share of the requests and of the memory: one
    step of each is under way at most, and they pass through the stages one behind the other.

    Attributes:
        stage_free: when each stage has no step any more, of all of them that share a pipeline. free_at: when the step
            that is under way has left the last stage of a pipeline.
        unread: tokens of prompts whose answers have not begun. held: bytes of caches that wait here until they are
            fetched. incoming: bytes that it fetches.
        offers: caches that others hold for it. link_free: when the next move may begin. between: what it does between
            two steps, and the seconds of each. acted: whether it has done any of that since the last step.
            acts_until: when it has done enough of it, unless all of it is packing.
    """

    plan: WorkerPlan
    scheduler: Scheduler
    stage_free: list[float]
    free_at: float = 0.0
    flights: dict[str, _SimulatedRequest] = field(default_factory=dict)
    busy: bool = False
    unread: int = 0
    held: int = 0
    incoming: int = 0
    offers: deque[tuple[_SimulatedRequest, _Worker]] = field(default_factory=deque)
    link_free: float = 0.0
    between: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    acted: bool = False
    acts_until: float = 0.0

    @property
    def load(self) -> int:
        """What there is to do, in tokens that are read, as the router of a cluster counts it."""
        return self.unread + DECODING * (len(self.flights) + len(self.offers))


class Simulation:
    """One run of a layout.

    Args:
        cache: what requests hold. link: between workers.

    Example:
        >>> from millpond_lab.cluster_plan.profile import A100
        >>> one = ClusterLayout((WorkerPlan("both", A100["opt-13b"][1]),))
        >>> found = Simulation(one, CacheSize(800_000, 800_000)).run([PlannedRequest(0.0, 100, 2)])
        >>> [(round(outcome.ttft, 4), round(outcome.tpot, 4)) for outcome in found]
        [(0.0284, 0.02)]
    """

    def __init__(self, layout: ClusterLayout, cache: CacheSize, link: Link | None = None) -> None:
        self._cache = cache
        self._link = link or Link()
        self._workers = [part for one in layout.workers for part in _parts(one)]
        self._readers = [worker for worker in self._workers if worker.plan.role != "decode"]
        self._decoders = [worker for worker in self._workers if worker.plan.role == "decode"]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._joins: list[float] = []  # when a worker may get a request, or its cache
        self._count = 0
        self._now = 0.0
        self._stop: MissLimit | None = None
        self._missed = 0

    def run(self, requests: Sequence[PlannedRequest], stop: MissLimit | None = None) -> list[RequestTimes] | None:
        """What becomes of each request, in their order; None where it was stopped.

        Raises:
            OptionError: a request that no worker's memory can hold.
        """
        flights = [_SimulatedRequest(str(number), request) for number, request in enumerate(requests)]
        self._stop, self._missed = stop, 0
        for flight in flights:
            self._check(flight.request)
            self._at(flight.request.at, lambda flight=flight: self._arrives(flight))  # type: ignore[misc]
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
            if stop is not None and self._missed > stop.most:
                return None
        return [
            RequestTimes(
                flight.first - flight.request.at,
                (flight.last - flight.first) / (flight.request.output - 1) if flight.request.output > 1 else None,
                flight.moved,
            )
            for flight in flights
        ]

    def _check(self, request: PlannedRequest) -> None:
        for worker in self._workers:
            need, memory = self._need(worker, request), worker.plan.memory
            if memory is not None and need.peak(1) > memory:
                raise OptionError(
                    f"a request of {request.prompt:,} + {request.output:,} tokens holds {need.peak(1):,} bytes, a "
                    f"worker that does {worker.plan.role} has {memory:,}; leave longer requests out or give more memory"
                )

    def _need(self, worker: _Worker, request: PlannedRequest) -> MemoryNeed:
        need = self._cache.need(request.prompt, request.output)
        if worker.plan.role == "prefill":
            return MemoryNeed(need.prefill, 0, 0)
        return MemoryNeed(0, 0, need.each) if worker.plan.role == "decode" else need

    def _at(self, when: float, act: Callable[[], None], joins: bool = True) -> None:
        """Let something happen; joins: it may give a worker more to do."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))
        if joins:
            heapq.heappush(self._joins, when)

    # ------------------------------------------------------------------ steps

    def _arrives(self, flight: _SimulatedRequest) -> None:
        worker = min(self._readers, key=lambda one: (one.load, one.free_at))
        worker.flights[flight.key] = flight
        worker.unread += flight.request.prompt
        worker.scheduler.add(SchedulerRequest(flight.key, flight.request.prompt, self._need(worker, flight.request)))
        self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        """Let a worker that waits begin a step when all that happens at this moment has happened."""
        if not worker.busy:
            worker.busy = True
            self._at(self._now, lambda: self._begin(worker), worker.plan.role == "prefill")

    def _begin(self, worker: _Worker) -> None:
        worker.busy = False
        packs = worker.plan.role == "prefill"
        if worker.between and (packs or not worker.acted or self._now <= worker.acts_until):
            self._act(worker)
            return
        if self._link.memory is not None and worker.held >= self._link.memory:
            return  # what was read must be fetched first
        if worker.stage_free[0] > self._now:  # others of the pipeline are in its first stage
            worker.busy = True
            self._at(worker.stage_free[0], lambda: self._begin(worker), packs)
            return
        step = worker.scheduler.plan()
        if step.empty:
            if worker.between:
                self._act(worker)
            return
        load = self._load(worker, step)
        piped = worker.plan.stages > 1
        begins, load = (self._now, load) if worker.between or piped else self._repeat(worker, step, load)
        ends = _pass(worker, load, begins)
        worker.busy = True
        self._at(ends, lambda: self._end(worker, step, ends - begins), packs)

    def _act(self, worker: _Worker) -> None:
        """Do the next thing between two steps."""
        seconds, act = worker.between.popleft()
        worker.busy = worker.acted = True
        self._at(self._now + seconds, lambda: self._go_on(worker, act), worker.plan.role == "prefill")

    def _repeat(self, worker: _Worker, step: Step, load: StepLoad) -> tuple[float, StepLoad]:
        """Take those steps at once in which nothing but the lengths of answers changes.

        They are steps of a worker all of whose requests decode, before the one in which the first answer ends and
        before the next moment at which it may get another request: the scheduler would plan each as it did this one.

        Returns:
            When the step begins that is still to be taken, and its load.
        """
        if step.prefills or len(worker.scheduler) != len(step.decodes):
            return self._now, load
        while self._joins and self._joins[0] < self._now:
            heapq.heappop(self._joins)
        until = self._joins[0] if self._joins else float("inf")
        flights = [worker.flights[scheduled.key] for scheduled in step.decodes]
        grows = len(flights) if self._cache.grows else 0
        seconds = worker.plan.times.seconds
        first = seconds(load)
        longer = seconds(replace(load, entries=load.entries + grows)) - first  # by as much after each step
        begins, steps = self._now, 0
        for _ in range(min(flight.request.output - flight.done for flight in flights) - 1):
            took = first + steps * longer
            if begins + took >= until:
                break
            begins, steps = begins + took, steps + 1
            worker.scheduler.record_step_time(step, took)
        load = replace(load, entries=load.entries + steps * grows)
        for flight, scheduled in zip(flights, step.decodes, strict=True):
            flight.done += steps
            scheduled.client.served += steps * scheduled.num_answers
        return begins, load

    def _load(self, worker: _Worker, step: Step) -> StepLoad:
        flights = [worker.flights[scheduled.key] for scheduled in step.decodes]
        return StepLoad(
            sum(n for _, n in step.prefills),
            sum(
                (scheduled.num_computed_tokens + n) ** 2 - scheduled.num_computed_tokens**2
                for scheduled, n in step.prefills
            ),
            sum(scheduled.num_computed_tokens + n == scheduled.num_prompt_tokens for scheduled, n in step.prefills),
            len(flights),
            sum(self._cache.kept(flight.request.prompt, flight.done) for flight in flights),
        )

    def _end(self, worker: _Worker, step: Step, took: float) -> None:
        worker.scheduler.record_step_time(step, took)
        worker.acted, worker.acts_until = False, self._now + CALLS_SHARE * took
        for scheduled, n in step.prefills:
            worker.scheduler.add_computed_tokens(scheduled, n)
            if scheduled.num_computed_tokens == scheduled.num_prompt_tokens:
                worker.unread -= scheduled.num_prompt_tokens
                self._drew(worker, scheduled)
        for scheduled in step.decodes:
            self._drew(worker, scheduled)
        self._fetch(worker)
        self._begin(worker)

    def _drew(self, worker: _Worker, scheduled: SchedulerRequest) -> None:
        """A token of an answer was drawn."""
        flight = worker.flights[scheduled.key]
        flight.done += 1
        flight.last = self._now
        if flight.done == 1:
            flight.first = self._now
            self._count_late(flight.first - flight.request.at, "ttft")
        ends = flight.done == flight.request.output
        if ends and flight.done > 1:
            self._count_late((flight.last - flight.first) / (flight.done - 1), "tpot")
        if ends or worker.plan.role == "prefill":
            worker.scheduler.remove(scheduled)
            del worker.flights[scheduled.key]
        if not ends and worker.plan.role == "prefill":
            flight.moved = self._cache.moved(flight.request.prompt)
            worker.held += flight.moved
            self._occupy(worker, worker.plan.moves.packing(flight.moved), lambda: self._offer(worker, flight))

    def _count_late(self, seconds: float, level: str) -> None:
        """Count a level that a request missed, for `stop`."""
        if self._stop is not None:
            self._missed += seconds > (self._stop.ttft if level == "ttft" else self._stop.tpot)

    # ------------------------------------------------------------------ moves

    def _occupy(self, worker: _Worker, seconds: float, act: Callable[[], None]) -> None:
        """Do something before the next step of a worker, which takes none meanwhile; at once where it costs nothing."""
        if not seconds:
            act()
            return
        worker.between.append((seconds, act))
        self._wake(worker)

    def _go_on(self, worker: _Worker, act: Callable[[], None]) -> None:
        act()
        self._begin(worker)

    def _offer(self, worker: _Worker, flight: _SimulatedRequest) -> None:
        decoder = min(self._decoders, key=lambda one: (one.load, one.free_at))
        decoder.offers.append((flight, worker))
        self._fetch(decoder)

    def _fetch(self, worker: _Worker) -> None:
        """Fetch caches that were offered, while there is room for them and few wait already."""
        memory = worker.plan.memory
        while worker.offers:
            flight, reader = worker.offers[0]
            need = self._need(worker, flight.request).peak(1)
            if memory is not None:
                waits = worker.incoming and worker.incoming + need > WAITING_SHARE * memory
                if waits or worker.scheduler.reserved_bytes + worker.incoming + need > memory:
                    return
            worker.offers.popleft()
            worker.incoming += need
            reader.link_free = max(self._now, reader.link_free) + flight.moved / self._link.bytes_per_s
            when = reader.link_free + self._link.latency_s
            self._at(when, lambda a=flight, b=reader, c=need: self._moved(worker, a, b, c))  # type: ignore[misc]

    def _moved(self, worker: _Worker, flight: _SimulatedRequest, reader: _Worker, need: int) -> None:
        reader.held -= flight.moved
        self._wake(reader)
        worker.flights[flight.key] = flight
        self._occupy(worker, worker.plan.moves.taking_in(flight.moved), lambda: self._taken_in(worker, flight, need))

    def _taken_in(self, worker: _Worker, flight: _SimulatedRequest, need: int) -> None:
        worker.incoming -= need
        prompt = flight.request.prompt
        worker.scheduler.add(
            SchedulerRequest(flight.key, prompt, self._need(worker, flight.request), num_computed_tokens=prompt)
        )
        self._wake(worker)
        self._fetch(worker)


def _parts(plan: WorkerPlan) -> list[_Worker]:
    """A worker, or those parts of its requests that are in different stages of its pipeline."""
    memory = None if plan.memory is None else plan.memory // plan.stages
    plan, free = replace(plan, memory=memory), [0.0] * plan.stages
    return [_Worker(plan, Scheduler(memory, step_tokens=plan.step_tokens), free) for _ in range(plan.stages)]


def _pass(worker: _Worker, load: StepLoad, begins: float) -> float:
    """When a step that begins then has passed through all stages, which are taken for as long."""
    seconds, ends = worker.plan.stage_seconds(load), begins
    for stage, free in enumerate(worker.stage_free):
        ends = worker.stage_free[stage] = max(ends, free) + seconds
    if worker.plan.stages > 1:
        worker.free_at = ends
    return ends
