"""Stage: the part of a pipeline in one process, with an engine for each of its micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from millpond.cluster.stage_model import StageLink, cut
from millpond.engine.llm import LLM, load
from millpond.engine.outputs import RequestOutput
from millpond.engine.sampling.params import SamplingParams


@dataclass(frozen=True)
class StageOptions:
    """Options that all stages of a pipeline have alike.

    Attributes:
        model: A name or folder.
        dtype: As of `LLM`.
        threads: Threads of each micro-batch.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        engine: Options of each engine.
    """

    model: str
    dtype: str | None
    threads: int
    stages: int
    micro_batches: int
    engine: dict[str, Any]


class Stage:
    """The layers of one stage, and the engines that run them.

    Each engine has its own requests, caches and links, and a step of each is under way at a time; they share weights.

    Args:
        options: See `StageOptions`.
        number: Number of the stage, from 0.
        before: Links to the stage before, one for each micro-batch; none for the first stage.
        behind: Links to the stage behind; none for the last.

    Raises:
        OptionError, UnsupportedModelError: see `cut`. StageLostError: another stage does not open.
    """

    def __init__(
        self, options: StageOptions, number: int, before: Sequence[StageLink], behind: Sequence[StageLink]
    ) -> None:
        model, tokenizer = load(options.model, None, options.dtype, options.threads)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        models = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(options.micro_batches - 1))]
        self._threads, self._links = options.threads, [*before, *behind]
        self._pool = ThreadPoolExecutor(
            options.micro_batches, initializer=torch.set_num_threads, initargs=(self._threads,)
        )
        self._llms: list[LLM] = []
        try:
            for index, one in enumerate(models):
                ends = (before[index] if before else None, behind[index] if behind else None)
                part = cut(one, number, options.stages, *ends)
                self._llms.append(LLM(part, runner="modules", tokenizer=tokenizer, **options.engine))
        except BaseException:
            self.close()
            raise

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of this stage, which all of its engines share."""
        return self._llms[0].engine.stats().weight_bytes

    def generate(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Answer prompts, which go to the micro-batches in turn.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            MillpondError: as `LLM.generate`, when the other micro-batches have ended too.
        """
        n = len(self._llms)
        parts = [
            self._pool.submit(llm.generate, list(prompts[index::n]), list(params[index::n]))
            for index, llm in enumerate(self._llms[: len(prompts)])
        ]
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            raise errors[0]
        answers = [part.result() for part in parts]
        return [answers[index % n][index // n] for index in range(len(prompts))]

    def close(self) -> None:
        """Close all links, and free all memory."""
        for link in self._links:
            link.close()
        self._pool.shutdown()
        while self._llms:
            self._llms.pop().close()
