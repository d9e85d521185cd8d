"""StepRecorder: steps and moves of an engine, one by one, for the profile of a plan."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.cluster.plan.cache_size import CacheSize
from millpond.cluster.plan.move_times import MoveTimes
from millpond.cluster.plan.profile import StepLoad
from millpond.engine.engine import Direction, Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.engine.scheduler import Step
from millpond.errors import OptionError
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.packed_model import LayerShape


@dataclass(frozen=True, slots=True)
class RecordedMove:
    """A request that left an engine or came into it.

    Attributes:
        request: its name. prompt: tokens of its prompt. began: on the clock of the machine, in seconds.
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


class RecordingEngines(Protocol):
    """Engines that answer requests, and say what they did."""

    @property
    def context_length(self) -> int:
        """Tokens that the model sees at a time."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids below it are tokens."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as it goes on."""
        ...

    async def record(self) -> None:
        """Record from now on, and forget what was recorded before.

        Raises:
            OptionError: an engine has requests, or a budget in bytes.
        """
        ...

    async def recorded(self) -> list[EngineRecord]:
        """What each engine did since; nothing is recorded any more."""
        ...

    async def time_moves(self, prompts: Sequence[int], seed: int) -> MoveTimes:
        """See `measure_moves`, of one engine that does nothing else."""
        ...


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
        engine.watch, engine.watch_moves = self._stepped, self._moved

    def end(self) -> EngineRecord:
        """What was recorded; nothing is any more."""
        self._engine.watch = self._engine.watch_moves = None
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
        for job, n in step.chunks:  # which have been read by now
            tokens += n
            squares += job.read**2 - (job.read - n) ** 2
            ended += job.read == job.prompt
        for job in step.decodes:
            done = self._done[job.key] = self._done.get(job.key, 0) + 1
            entries += self._cache.kept(job.prompt, done)
        return StepLoad(tokens, squares, ended, len(step.decodes), entries)


def cache_of(engine: Engine) -> tuple[CacheSize, int]:
    """What a request of an engine holds with its own method, budget and codec, and the numbers of a key.

    Raises:
        OptionError: a budget in bytes.
    """
    layers, recipe = engine.layers, engine.recipe
    entry_bytes = float(sum(recipe.entry_bytes(layer) for layer in layers))
    stored = sum(_stored_bytes(recipe, layer) for layer in layers)
    policy = recipe.policy
    grows = policy.keeps_all or (policy.grows_when_decoded and not policy.makes_room)
    budget = None if policy.keeps_all else recipe.budget
    return CacheSize(entry_bytes, stored, budget, grows), layers[0].key_dim


def _stored_bytes(recipe: CacheLayout, layer: LayerShape) -> float:
    """Bytes of a kept token in one layer; codes as far as they take no more than numbers as they are."""
    own, codec = recipe.entry_bytes(layer), recipe.codec(layer)
    if codec is None:
        return own
    numbers = layer.n_kv_heads * (layer.key_dim + layer.value_dim)
    return min(own, numbers * codec.bits_per_element(layer.key_dim, layer.value_dim) / 8)
