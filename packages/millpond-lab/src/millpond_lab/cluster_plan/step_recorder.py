"""StepRecorder: steps and moves of an engine, one by one, for the profile of a plan."""

from __future__ import annotations

import time

from millpond.engine.engine import Direction, Engine
from millpond.engine.scheduler import Step
from millpond.errors import OptionError
from millpond_lab.cluster_plan.engine_cache import cache_of
from millpond_lab.cluster_plan.profile import StepLoad
from millpond_lab.cluster_plan.recording import EngineRecord, RecordedMove


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
        for job, n in step.chunks:  # which have been read by now
            tokens += n
            squares += job.read**2 - (job.read - n) ** 2
            ended += job.read == job.prompt
        for job in step.decodes:
            done = self._done[job.key] = self._done.get(job.key, 0) + 1
            entries += self._cache.kept(job.prompt, done)
        return StepLoad(tokens, squares, ended, len(step.decodes), entries)
