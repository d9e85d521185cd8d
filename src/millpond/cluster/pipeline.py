"""PipelineLLM: a model whose layers are in several processes, each with the caches of its own layers."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from os import PathLike, fspath
from typing import Any, Self

from millpond.cluster.stage import Stage, StageOptions
from millpond.cluster.stage_model import StageLink, StageLostError
from millpond.cpu_limit import usable_cpus
from millpond.engine.outputs import RequestOutput
from millpond.engine.prompts import Prompts, prompts_of
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import MillpondError, OptionError, unknown

#: Methods whose rules for a layer know nothing of other layers.
METHODS = ("full", "h2o", "snapkv", "streaming")
#: Most processes, and most micro-batches.
MAX_STAGES = 64
#: Seconds that a process has to end by itself.
_CLOSE_S = 5.0


class PipelineLLM:
    """A model whose layers are shared out over processes, with the tokens of one.

    Each process holds a part of the weights and of the caches. Layers run as modules: tokens are those of
    `LLM(runner="modules")`. With several micro-batches each stage can compute a step of one while others compute those
    of others; as the rows of a step are other ones then, sums of 16 bits are rounded otherwise than in one process.

    Args:
        model: A name or folder that every process loads.
        stages: Number of processes, this one among them.
        micro_batches: Parts of the prompts whose steps are under way at a time.
        method: "full", "h2o", "snapkv" or "streaming": methods that choose in each layer by itself.
        budget: As of `LLM`.
        codec: As of `LLM`, one format for all layers.
        dtype: As of `LLM`.
        threads: Of each micro-batch in each process; None: the CPUs of this machine, shared out over processes.
        max_step_tokens: As of `LLM`.

    Raises:
        OptionError: stages, micro-batches or a method out of range, or more stages than layers.
        UnsupportedModelError: see `cut`.
        MillpondError: another process does not start; none is left.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        stages: int = 2,
        micro_batches: int = 1,
        method: str = "full",
        budget: str | int | float | None = None,
        codec: str = "auto",
        dtype: str | None = None,
        threads: int | None = None,
        max_step_tokens: int = 512,
    ) -> None:
        if not 2 <= stages <= MAX_STAGES:
            raise OptionError(f"stages={stages} must be from 2 to {MAX_STAGES}; one process is millpond.LLM")
        if not 1 <= micro_batches <= MAX_STAGES:
            raise OptionError(f"micro_batches={micro_batches} must be from 1 to {MAX_STAGES}")
        if method not in METHODS:
            raise unknown("method of a pipeline", method, METHODS)
        engine = {"method": method, "budget": budget, "codec": codec, "max_step_tokens": max_step_tokens}
        shared = threads or max(1, usable_cpus() // stages)
        options = StageOptions(fspath(model), dtype, shared, stages, micro_batches, engine)
        context = multiprocessing.get_context("spawn")
        pipes = [[context.Pipe() for _ in range(micro_batches)] for _ in range(stages - 1)]
        self._names = count()
        self._controls: list[Connection] = []
        self._processes: list[Any] = []
        self._stage: Stage | None = None
        behind = [StageLink(ours, "stage 1") for ours, _ in pipes[0]]
        try:
            for number in range(1, stages):
                ours, theirs = context.Pipe()
                ends = (
                    [end for _, end in pipes[number - 1]],
                    [end for end, _ in pipes[number]] if number < stages - 1 else [],
                )
                process = context.Process(target=_serve, args=(options, number, *ends, theirs), daemon=True)
                process.start()
                for end in (theirs, *ends[0], *ends[1]):
                    end.close()  # so that a process that ends is noticed here
                self._controls.append(ours)
                self._processes.append(process)
            self._stage = Stage(options, 0, [], behind)
            for control in self._controls:
                self._check(control.recv())
        except (StageLostError, EOFError) as error:
            self.close()
            raise self._reason(error) from error
        except BaseException:
            for link in behind:
                link.close()
            for process in self._processes:
                process.kill()
            self.close()
            raise

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in this process.

        Raises:
            StageLostError: the pipeline is closed.
        """
        return self._open_stage().weight_bytes

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer all prompts, as `LLM.generate` does, in the order of the prompts.

        Raises:
            OptionError: another number of params, or a prompt is refused.
            StageLostError: a process has ended, and the pipeline with it.
        """
        stage, each = self._open_stage(), prompts_of(prompts)
        chosen = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(each)
        if len(chosen) != len(each):
            raise OptionError(f"{len(chosen)} params for {len(each)} prompts; give one, or one for each")
        seeded = [one if one.seed is not None else replace(one, seed=secrets.randbits(63)) for one in chosen]
        try:
            for control in self._controls:
                control.send((each, seeded))
            outputs = stage.generate(each, seeded)
            for control in self._controls:
                self._check(control.recv())
        except (StageLostError, EOFError, OSError) as error:
            self.close()
            raise self._reason(error) from error
        except MillpondError:  # refused here, and so by all others
            for control in self._controls:
                control.recv()
            raise
        return [replace(output, request_id=str(next(self._names))) for output in outputs]

    def close(self) -> None:
        """End the other processes."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()
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

    def _open_stage(self) -> Stage:
        if self._stage is None:
            raise StageLostError("the pipeline is closed: begin again with a new one")
        return self._stage

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


def _serve(
    options: StageOptions, number: int, before: Sequence[Connection], behind: Sequence[Connection], control: Connection
) -> None:
    """Run a stage behind the first one, until the owner ends it or is gone."""
    ends = (
        [StageLink(end, f"stage {number - 1}") for end in before],
        [StageLink(end, f"stage {number + 1}") for end in behind],
    )
    try:
        stage = Stage(options, number, *ends)
        control.send(None)
        while (message := control.recv()) is not None:
            answer = None
            try:
                stage.generate(*message)
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
