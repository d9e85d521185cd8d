"""PipelineLLM: a model whose layers are in several processes, each with the caches of its own layers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from os import PathLike, fspath
from typing import Self

from millpond.cluster.stage import Stage, StageOptions
from millpond.cluster.stage_model import StageLink, StageLostError
from millpond.cluster.stage_processes import StageProcesses
from millpond.cpu_limit import usable_cpus
from millpond.engine.outputs import RequestOutput
from millpond.engine.prompts import Prompts, prompts_of
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import MillpondError, OptionError, unknown

#: Methods whose rules for a layer know nothing of other layers.
METHODS = ("full", "h2o", "snapkv", "streaming")
#: Most processes, and most micro-batches.
MAX_STAGES = 64


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
        check_stages(stages)
        if not 1 <= micro_batches <= MAX_STAGES:
            raise OptionError(f"micro_batches={micro_batches} must be from 1 to {MAX_STAGES}")
        if method not in METHODS:
            raise unknown("method of a pipeline", method, METHODS)
        engine = {"method": method, "budget": budget, "codec": codec, "max_step_tokens": max_step_tokens}
        shared = threads or max(1, usable_cpus() // stages)
        options = StageOptions(fspath(model), dtype, shared, stages, micro_batches, engine)
        self._names = count()
        self._stage: Stage | None = None
        self._others = StageProcesses(options, _serve)
        try:
            self._stage = Stage(options, 0, [], self._others.links)
            self._others.wait()
        except (StageLostError, EOFError) as error:
            self.close()
            raise self._others.reason(error) from error
        except BaseException:
            self._others.kill()
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
            self._others.tell((each, seeded))
            outputs = stage.generate(each, seeded)
            self._others.wait()
        except (StageLostError, EOFError, OSError) as error:
            self.close()
            raise self._others.reason(error) from error
        except MillpondError:  # refused here, and so by all others
            self._others.answers()
            raise
        return [replace(output, request_id=str(next(self._names))) for output in outputs]

    def close(self) -> None:
        """End the other processes."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()
        self._others.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_stage(self) -> Stage:
        if self._stage is None:
            raise StageLostError("the pipeline is closed: begin again with a new one")
        return self._stage


def check_stages(stages: int) -> None:
    """Check a number of processes.

    Raises:
        OptionError: it is not from 2 to `MAX_STAGES`.
    """
    if not 2 <= stages <= MAX_STAGES:
        raise OptionError(f"stages={stages} must be from 2 to {MAX_STAGES}; one process is millpond.LLM")


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
