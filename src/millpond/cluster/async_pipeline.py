"""AsyncPipelineLLM: a pipeline of processes that answers requests of many tasks, for a server."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from os import PathLike, fspath
from typing import Any

from millpond.cluster.pipeline import check_stages
from millpond.cluster.stage import StageOptions
from millpond.cluster.stage_engine import FirstStageEngine, LaterStageEngine, check_config
from millpond.cluster.stage_model import StageLink, StageLostError
from millpond.cluster.stage_processes import StageProcesses
from millpond.cpu_limit import usable_cpus
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import Placement
from millpond.engine.offload.options import LoadOptions
from millpond.models.dtype_name import dtype_name


class AsyncPipelineLLM(AsyncLLM):
    """Answers requests of many tasks with a model whose layers are shared out over processes of this machine.

    This process has the first layers, takes requests and steps; the others do the same steps. Tokens are those of
    `AsyncLLM` with `runner="modules"`. Figures and cache snapshots are those of this process. Where a process ends, or
    a pass fails within its layers, all requests end with an error, and `trouble` says so.

    Args:
        model: A name or folder that every process loads.
        config: Settings of the engine; None for the defaults.
        stages: Number of processes, this one among them.
        model_name: Name that clients use; None: the model's own.
        dtype: As of `LLM`.
        threads: Threads of each process; None: the CPUs of this machine, shared out.

    Raises:
        OptionError: stages out of range, or a setting that needs all layers in one process.
        UnsupportedModelError: see `millpond.cluster.stage_model.cut`.
        StageLostError: another process does not start.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        config: EngineConfig | None = None,
        *,
        stages: int = 2,
        model_name: str | None = None,
        dtype: str | None = None,
        threads: int | None = None,
    ) -> None:
        check_stages(stages)
        self._n_stages = stages
        super().__init__(
            fspath(model), config, model_name=model_name, dtype=dtype, threads=threads or _share_of(stages)
        )

    def _open(self, model: Any, config: EngineConfig, loading: LoadOptions) -> tuple[Engine, Placement | None]:
        check_config(config)
        dtype, threads = dtype_name(loading.dtype), loading.threads or 1
        others = StageProcesses(StageOptions(model, dtype, threads, self._n_stages, 1, {"config": config}), _follow)
        try:
            engine = _PipelineEngine(others, model=model, config=config, dtype=dtype, threads=threads)
            others.wait()
        except (StageLostError, EOFError, OSError) as error:
            others.close()
            raise others.reason(error) from error
        except BaseException:
            others.kill()
            raise
        return engine, None


def _share_of(stages: int) -> int:
    return max(1, usable_cpus() // stages)


class _PipelineEngine(FirstStageEngine):
    """Engine of the first stage, which ends the other processes when it is closed."""

    def __init__(self, others: StageProcesses, **options: Any) -> None:
        self._others = others
        ends = {"number": 0, "stages": len(others.processes) + 1, "before": None, "behind": others.links[0]}
        super().__init__(others.tell, **ends, **options)

    def step(self) -> list[Any]:
        try:
            return super().step()
        except StageLostError as error:
            raise self._others.reason(error) from error

    def close(self) -> None:
        """End the other processes, and close as `Engine.close`."""
        self._others.close()
        super().close()


def _follow(
    options: StageOptions, number: int, before: Sequence[Connection], behind: Sequence[Connection], control: Connection
) -> None:
    """Run a stage behind the first one, step by step, until the owner ends it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner lets requests finish, and ends this one then
    try:
        engine = LaterStageEngine(
            model=options.model,
            config=options.engine["config"],
            dtype=options.dtype,
            threads=options.threads,
            number=number,
            stages=options.stages,
            before=StageLink(before[0], f"stage {number - 1}"),
            behind=StageLink(behind[0], f"stage {number + 1}") if behind else None,
        )
        control.send(None)
        while (order := control.recv()) is not None:
            engine.follow(order)
        engine.close()
    except EOFError:
        return
    except Exception as error:  # whatever it is, the owner must hear of it
        with suppress(OSError):
            control.send(f"{type(error).__name__}: {error}")
