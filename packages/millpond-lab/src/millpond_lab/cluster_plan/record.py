"""Records of the steps and moves of engines, in this process or in workers, for the profile of a plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.scheduler import Step
from millpond.engine.transfer.moves import Direction
from millpond.errors import OptionError
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.packed_model import LayerShape
from millpond_lab.cluster_plan.layout import CacheSize, MoveTimes
from millpond_lab.cluster_plan.profile import StepLoad, fit_moves


@dataclass(frozen=True, slots=True)
class RecordedMove:
    """A request that left an engine or came into it.

    Attributes:
        request: its name. num_prompt_tokens: tokens of its prompt. began: on the clock of the machine, in seconds.
        seconds: for which the engine took no step.
    """

    direction: Direction
    request: str
    prompt: int
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What one engine did while it was recorded.

    Attributes:
        cache: what its requests hold. head_dim: numbers of a key. step_tokens: most tokens of a step that reads.
        steps: what each did, and its seconds. moves: of requests, in order.
    """

    cache: CacheSize
    head_dim: int
    step_tokens: int
    steps: tuple[tuple[StepLoad, float], ...] = ()
    moves: tuple[RecordedMove, ...] = ()


def cache_of(engine: Engine) -> tuple[CacheSize, int]:
    """What a request of an engine holds with its own method, budget and codec, and the numbers of a key.

    Raises:
        OptionError: a budget in bytes.
    """
    layers, cache_factory = engine.layers, engine.cache_factory
    entry_bytes = float(sum(cache_factory.entry_bytes(layer) for layer in layers))
    stored = sum(_stored_bytes(cache_factory, layer) for layer in layers)
    policy = cache_factory.policy
    grows = policy.keeps_all or (policy.grows_when_decoded and not policy.makes_room)
    budget = None if policy.keeps_all else cache_factory.budget
    return CacheSize(entry_bytes, stored, budget, grows), layers[0].key_dim


def _stored_bytes(layout: CacheLayout, layer: LayerShape) -> float:
    """Bytes of a kept token in one layer; codes as far as they take no more than numbers as they are."""
    own, codec = layout.entry_bytes(layer), layout.codec(layer)
    if codec is None:
        return own
    numbers = layer.n_kv_heads * (layer.key_dim + layer.value_dim)
    return min(own, numbers * codec.bits_per_element(layer.key_dim, layer.value_dim) / 8)


class StepRecorder:
    """Records an engine, whose thread calls this.

    The seconds of a step begin where the last one ended, if the engine had work left then: what its thread does
    between two steps, or waits for, holds up every request as the step itself does. Moves have seconds of their own.

    Raises:
        OptionError: the engine has requests, or a budget in bytes.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.busy:
            raise OptionError("the engine has requests; measure one that has none")
        self._engine = engine
        self._cache, self._head_dim = cache_of(engine)
        self._steps: list[tuple[StepLoad, float]] = []
        self._moves: list[RecordedMove] = []
        self._done: dict[str, int] = {}  # tokens of each answer
        self._ended: float | None = None  # when the last step ended; None: the engine had nothing to do then
        self._moving = 0.0  # seconds of moves since
        engine.on_step, engine.on_transfer = self._stepped, self._moved

    def end(self) -> EngineRecord:
        """What was recorded; nothing is any more."""
        self._engine.on_step = self._engine.on_transfer = None
        step_tokens = self._engine.config.max_step_tokens
        return EngineRecord(self._cache, self._head_dim, step_tokens, tuple(self._steps), tuple(self._moves))

    def _stepped(self, step: Step, seconds: float) -> None:
        now = time.perf_counter()
        took = seconds if self._ended is None else now - self._ended - self._moving
        self._steps.append((self._load(step), took))
        self._ended, self._moving = now if self._engine.busy else None, 0.0

    def _moved(self, direction: Direction, request: str, prompt: int, seconds: float) -> None:
        self._moves.append(RecordedMove(direction, request, prompt, time.time() - seconds, seconds))
        self._moving += seconds
        if not self._engine.busy:
            self._ended = None

    def _load(self, step: Step) -> StepLoad:
        tokens = squares = ended = entries = 0
        for scheduled, n in step.prefills:  # which have been read by now
            tokens += n
            squares += scheduled.num_computed_tokens**2 - (scheduled.num_computed_tokens - n) ** 2
            ended += scheduled.num_computed_tokens == scheduled.num_prompt_tokens
        for scheduled in step.decodes:
            done = self._done[scheduled.key] = self._done.get(scheduled.key, 0) + 1
            entries += self._cache.kept(scheduled.num_prompt_tokens, done)
        return StepLoad(tokens, squares, ended, len(step.decodes), entries)


#: Moves of each length that count, after one that warms up.
MOVES = 7


def measure_moves(
    engine: Engine,
    cache: CacheSize,
    prompts: Sequence[int],
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> MoveTimes:
    """Let an engine pack requests right after their prompts and take them in again, and fit the medians.

    Args:
        cache: of a request, whose bytes a simulation counts.
        prompts: tokens of the prompts, two lengths at least to tell bytes from moves.
        seed: of their tokens.
        clock: of the seconds.

    Raises:
        OptionError: requests of this engine cannot move, see `Engine.export_request`. PoolFullError: there is no room.
    """
    draw = np.random.default_rng(seed)
    sizes, packs, takes = list[int](), list[float](), list[float]()
    for length in sorted(set(prompts)):
        times = [
            _move(engine, f"move-{length}-{n}", draw.integers(0, engine.vocab_size, length).tolist(), clock)
            for n in range(MOVES + 1)
        ][1:]
        sizes.append(cache.moved(length))
        packs.append(statistics.median(pack for pack, _ in times))
        takes.append(statistics.median(take for _, take in times))
    return MoveTimes(*fit_moves(sizes, packs), *fit_moves(sizes, takes))


def _move(engine: Engine, name: str, prompt: Sequence[int], clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of packing a request whose first token was drawn, and of taking it in."""
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    engine.add(Request(request_id=name, prompt=tuple(prompt), params=params))
    try:
        while not any(one.token_ids for output in engine.step() for one in output.completions):
            pass
        began = clock()
        data = engine.export_request(name)
        packed = clock()
        engine.import_request(data)
        return packed - began, clock() - packed
    finally:
        engine.drain()


#: Of the engines of this process that are being recorded.
_RECORDERS: WeakKeyDictionary[AsyncLLM, StepRecorder] = WeakKeyDictionary()


async def begin(llm: AsyncLLM) -> None:
    """Record from now on, and forget what was recorded before; see `StepRecorder`.

    Raises:
        OptionError: the engine has requests, or a budget in bytes.
    """
    _RECORDERS[llm] = await llm.call(StepRecorder)


async def end(llm: AsyncLLM) -> EngineRecord:
    """What the engine did since `begin`; nothing is recorded any more.

    Raises:
        OptionError: it was not recorded.
    """
    recorder = _RECORDERS.pop(llm, None)
    if recorder is None:
        raise OptionError("this engine was not recorded: it may have started since; take the profile again")
    return await llm.call(lambda _: recorder.end())


async def time_moves(llm: AsyncLLM, prompts: Sequence[int], seed: int) -> MoveTimes:
    """See `measure_moves`, of an engine that does nothing else."""
    return await llm.call(lambda engine: measure_moves(engine, cache_of(engine)[0], prompts, seed))


class RecordedEngines:
    """Engines that answer requests, and say what they did; `llm` is closed by the caller."""

    def __init__(self, llm: AsyncLLM | AsyncClusterLLM) -> None:
        self._llm = llm

    @property
    def context_length(self) -> int:
        """Tokens that the model sees at a time."""
        return self._llm.context_length

    @property
    def vocab_size(self) -> int:
        """Ids below it are tokens."""
        return self._llm.vocab_size

    def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as it goes on."""
        return self._llm.stream(request)

    async def record(self) -> None:
        """Record from now on, and forget what was recorded before.

        Raises:
            OptionError: an engine has requests, or a budget in bytes.
        """
        if isinstance(self._llm, AsyncClusterLLM):
            await self._llm.call_workers(begin)
        else:
            await begin(self._llm)

    async def recorded(self) -> list[EngineRecord]:
        """What each engine did since; nothing is recorded any more.

        Raises:
            OptionError: an engine was not recorded.
        """
        if isinstance(self._llm, AsyncClusterLLM):
            return await self._llm.call_workers(end)
        return [await end(self._llm)]

    async def time_moves(self, prompts: Sequence[int], seed: int) -> MoveTimes:
        """See `measure_moves`, of one engine that does nothing else."""
        if isinstance(self._llm, AsyncClusterLLM):
            (found,) = await self._llm.call_workers(time_moves, prompts, seed, most=1)
            return found
        return await time_moves(self._llm, prompts, seed)
