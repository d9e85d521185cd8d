"""EngineRecord: the steps and moves of an engine; RecordingEngines: engines that can tell them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.cluster.plan.cache_size import CacheSize
from millpond.cluster.plan.move_times import MoveTimes
from millpond.cluster.plan.profile import StepLoad
from millpond.engine.engine import Direction
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request


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
        """What each engine did since; nothing is recorded any more.

        Raises:
            OptionError: an engine was not recorded.
        """
        ...

    async def time_moves(self, prompts: Sequence[int], seed: int) -> MoveTimes:
        """See `measure_moves`, of one engine that does nothing else."""
        ...
