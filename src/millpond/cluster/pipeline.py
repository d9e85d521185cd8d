"""PipelineLLM: a model whose layers are in several processes, each with the caches of its own layers."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from os import PathLike, fspath
from typing import Any, Self

from millpond.cluster.stage_model import StageLink, StageLostError, cut
from millpond.cpu_limit import usable_cpus
from millpond.engine.llm import LLM, load
from millpond.engine.outputs import RequestOutput
from millpond.engine.prompts import Prompts, prompts_of
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import MillpondError, OptionError, unknown

#: Methods whose rules for a layer know nothing of other layers.
METHODS = ("full", "h2o", "snapkv", "streaming")
#: Most processes.
MAX_STAGES = 64
#: Seconds that a process has to end by itself.
_CLOSE_S = 5.0


class PipelineLLM:
    """Answers prompts with a model whose layers are shared out over processes; tokens are those of one process.

    The stages run the same steps, and one step at a time is under way: while one stage computes, the others wait. So
    each process holds a part of the weights and of the caches, and answers take as long as in one process, or longer.
    Layers run as modules, so that tokens are those of `LLM(runner="modules")`.

    Args:
        model: A name or folder that every process loads.
        stages: Number of processes, this one among them.
        method: "full", "h2o", "snapkv" or "streaming": methods that choose in each layer by itself.
        budget: As of `LLM`.
        codec: As of `LLM`, one format for all layers.
        dtype: As of `LLM`.
        threads: Of each process; None: the CPUs of this machine, shared out.
        max_step_tokens: As of `LLM`.

    Raises:
        OptionError: stages or a method out of range, or more stages than layers. UnsupportedModelError: see `cut`.
        MillpondError: another process does not start; none is left.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        stages: int = 2,
        method: str = "full",
        budget: str | int | float | None = None,
        codec: str = "auto",
        dtype: str | None = None,
        threads: int | None = None,
        max_step_tokens: int = 512,
    ) -> None:
        if not 2 <= stages <= MAX_STAGES:
            raise OptionError(f"stages={stages} must be from 2 to {MAX_STAGES}; one process is millpond.LLM")
        if method not in METHODS:
            raise unknown("method of a pipeline", method, METHODS)
        options = {"method": method, "budget": budget, "codec": codec, "max_step_tokens": max_step_tokens}
        shared = threads or max(1, usable_cpus() // stages)
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(stages - 1)]
        self._controls: list[Connection] = []
        self._processes: list[Any] = []
        self._llm: LLM | None = None
        self._behind = StageLink(pipes[0][0], "stage 1")
        try:
            for stage in range(1, stages):
                ours, theirs = context.Pipe()
                ends = (pipes[stage - 1][1], pipes[stage][0] if stage < stages - 1 else None)
                arguments = (fspath(model), dtype, shared, options, stage, stages, *ends, theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                for end in (theirs, *ends):
                    if end is not None:
                        end.close()  # so that a process that ends is noticed here
                self._controls.append(ours)
                self._processes.append(process)
            self._llm = _open(fspath(model), dtype, shared, options, 0, stages, None, self._behind)
            for control in self._controls:
                self._check(control.recv())
        except (StageLostError, EOFError) as error:
            self.close()
            raise self._reason(error) from error
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer all prompts: the outputs of `LLM.generate`, in the order of the prompts; see there for errors.

        Raises:
            StageLostError: a process has ended, and the pipeline with it.
        """
        if self._llm is None:
            raise StageLostError("the pipeline is closed: begin again with a new one")
        each: Any = prompts_of(prompts)
        chosen = [params or SamplingParams()] * len(each) if not isinstance(params, Sequence) else list(params)
        seeded = [one if one.seed is not None else replace(one, seed=secrets.randbits(63)) for one in chosen]
        try:
            for control in self._controls:
                control.send((each, seeded))
            outputs = self._llm.generate(each, seeded)
            for control in self._controls:
                self._check(control.recv())
        except (StageLostError, EOFError, OSError) as error:
            self.close()
            raise self._reason(error) from error
        except MillpondError:  # refused here, and so by all others
            for control in self._controls:
                control.recv()
            raise
        return outputs

    def close(self) -> None:
        """End the other processes."""
        self._behind.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.close()
        for control in self._controls:
            with suppress(OSError):
                control.send(None)
        for process in self._processes:
            process.join(_CLOSE_S)
            if process.is_alive():
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @staticmethod
    def _check(answer: str | None) -> None:
        if answer is not None:
            raise StageLostError(answer)

    def _reason(self, error: BaseException) -> StageLostError:
        """Return what a process that ended said last, or else what was noticed of it here."""
        for number, control in enumerate(self._controls, 1):
            with suppress(OSError, EOFError):
                while control.poll(0):
                    if (answer := control.recv()) is not None:
                        return StageLostError(f"stage {number}: {answer}")
        return error if isinstance(error, StageLostError) else StageLostError("a stage has ended: begin again")


def _open(
    model: str,
    dtype: str | None,
    threads: int,
    options: dict[str, Any],
    stage: int,
    stages: int,
    before: StageLink | None,
    behind: StageLink | None,
) -> LLM:
    loaded, tokenizer = load(model, None, dtype, threads)
    return LLM(cut(loaded, stage, stages, before, behind), runner="modules", tokenizer=tokenizer, **options)


def _serve(
    model: str,
    dtype: str | None,
    threads: int,
    options: dict[str, Any],
    stage: int,
    stages: int,
    before: Connection,
    behind: Connection | None,
    control: Connection,
) -> None:
    """Run a stage behind the first one, until the owner ends it or is gone."""
    links = StageLink(before, f"stage {stage - 1}"), StageLink(behind, f"stage {stage + 1}") if behind else None
    try:
        llm = _open(model, dtype, threads, options, stage, stages, *links)
        control.send(None)
        while (message := control.recv()) is not None:
            answer = None
            try:
                llm.generate(*message)
            except StageLostError:
                raise
            except MillpondError as error:
                answer = str(error)
            control.send(answer)
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:  # whatever it is, the owner must hear of it
        with suppress(OSError):
            control.send(f"{type(error).__name__}: {error}")
