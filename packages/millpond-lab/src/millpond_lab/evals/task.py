"""Tasks, and the registry that finds them by walking `evals/tasks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from millpond.registry import Registry
from millpond_lab.evals.sample import Question, Sample

#: generate: the answer is decoded, then scored. choice: the likeliest continuation wins. perplexity: the questions'
#: references[0] is text whose tokens are fed one by one. fidelity: as perplexity, compared with the full cache's run.
Kind = Literal["generate", "choice", "perplexity", "fidelity"]


class Task(Protocol):
    """Draws samples and scores answers. A task knows neither model nor method."""

    @property
    def kind(self) -> Kind:
        """How its samples are run."""
        ...

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        """The first `count` samples under `seed`; fewer where the data ends. Pure in its arguments.

        Raises:
            OptionError, DataError: options that do not fit together, or a data file that cannot be read.
        """
        ...

    def score(self, question: Question, answer: str) -> float:
        """How good a decoded answer is, 0 to 1; called for tasks of the kind "generate" only."""
        ...


TASKS: Registry[Task] = Registry("task", "millpond_lab.evals.tasks", group="millpond.evals.tasks")

task = TASKS.register
