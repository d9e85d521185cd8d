"""OneEngine: an engine of this process whose steps and moves are recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from millpond.cluster.plan.engine_cache import cache_of
from millpond.cluster.plan.measure_moves import measure_moves
from millpond.cluster.plan.move_times import MoveTimes
from millpond.cluster.plan.recording import EngineRecord
from millpond.cluster.plan.step_recorder import StepRecorder
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.errors import OptionError


class OneEngine:
    """See `RecordingEngines`; `llm` is closed by the caller."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._recorder: StepRecorder | None = None

    @property
    def context_length(self) -> int:
        """See `RecordingEngines`."""
        return self._llm.context_length

    @property
    def vocab_size(self) -> int:
        """See `RecordingEngines`."""
        return self._llm.vocab_size

    def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """See `RecordingEngines`."""
        return self._llm.stream(request)

    async def record(self) -> None:
        """See `RecordingEngines`."""
        self._recorder = await self._llm.call(StepRecorder)

    async def recorded(self) -> list[EngineRecord]:
        """See `RecordingEngines`."""
        recorder = self._recorder
        if recorder is None:
            raise OptionError("this engine was not recorded: it may have started since; take the profile again")
        return [await self._llm.call(lambda _: recorder.end())]

    async def time_moves(self, prompts: Sequence[int], seed: int) -> MoveTimes:
        """See `RecordingEngines`."""
        return await self._llm.call(lambda engine: measure_moves(engine, cache_of(engine)[0], prompts, seed))
