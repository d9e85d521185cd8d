"""Records of the steps and moves of an engine behind an `AsyncLLM`: functions that workers of a cluster are sent."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from millpond.engine.async_llm import AsyncLLM
from millpond.errors import OptionError
from millpond_lab.cluster_plan.engine_cache import cache_of
from millpond_lab.cluster_plan.measure_moves import measure_moves
from millpond_lab.cluster_plan.move_times import MoveTimes
from millpond_lab.cluster_plan.recording import EngineRecord
from millpond_lab.cluster_plan.step_recorder import StepRecorder

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
