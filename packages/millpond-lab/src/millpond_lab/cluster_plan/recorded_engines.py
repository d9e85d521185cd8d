"""RecordedEngines: one engine of this process, or the workers of a cluster, whose steps and moves are recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond_lab.cluster_plan.move_times import MoveTimes
from millpond_lab.cluster_plan.record import begin, end, time_moves
from millpond_lab.cluster_plan.recording import EngineRecord


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
