"""EngineRecord: the steps and moves of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.engine.engine import Direction
from millpond_lab.cluster_plan.cache_size import CacheSize
from millpond_lab.cluster_plan.profile import StepLoad


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
