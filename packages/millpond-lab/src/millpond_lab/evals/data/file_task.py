"""Tasks whose samples are rows of a file, in an order that the seed names, so that the first few are a fair share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from millpond.errors import DataError, OptionError
from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.data.data_files import read_text
from millpond_lab.evals.data.random_streams import stream
from millpond_lab.evals.data.token_budget import TokenBudget
from millpond_lab.evals.metrics import exact
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Graded(Question):
    """A question that says by itself how its answer is graded, for files that mix ways.

    Attributes:
        metric: a name that the task knows. classes: what the answer may be, where it names one of some classes.
    """

    metric: str = ""
    classes: tuple[str, ...] = ()


def best_exact(question: Question, answer: str) -> float:
    """Exact match with one of the references."""
    return exact(question.references, answer)


@dataclass(frozen=True)
class FileTask(Generic[Item]):
    """A task over a file.

    Attributes:
        name: of the task. read: all items of the file (rows, or groups of rows), or a `DataError`.
        make: the sample of one item. grade: what an answer is worth. kind: see `Task.kind`.
    """

    name: str
    read: Callable[[], Sequence[Item]]
    make: Callable[[Item, TokenBudget], Sample]
    grade: Callable[[Question, str], float] = best_exact
    kind: Kind = "generate"

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        """See `Task.samples`."""
        refuse_pond(self.name, tokenizer)
        items, room = self.read(), TokenBudget(tokenizer)
        order = list(range(len(items)))
        stream(self.name, seed).shuffle(order)
        for index in order[:count]:
            yield self.make(items[index], room)

    def score(self, question: Question, answer: str) -> float:
        """See `Task.score`."""
        return self.grade(question, answer)


def refuse_pond(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model can read a file's words at all.

    Raises:
        OptionError: it is `pond-recall`, to which nearly every word is unknown.
    """
    if pond_tasks.speaks_pond(tokenizer):
        raise OptionError(f"{name}: pond-recall knows none of the words of a file; name another model, or another task")


def shortened(room: TokenBudget, context: str, questions: Sequence[str], max_tokens: int) -> str:
    """`context` with its middle cut out where the prompt is longer than `max_tokens` (0: never)."""
    if not max_tokens or room.prompt(context, questions) <= max_tokens:
        return context
    return room.cut_middle(context, max_tokens - max(map(room.tokens, questions)))


def read_labels(path: str, count: int, choices: int) -> list[int]:
    """`count` indices below `choices`, one a line.

    Raises:
        DataError: a line that is no such index, or another number of lines.
    """
    lines = read_text(path).split()
    for number, line in enumerate(lines, start=1):
        if not line.isdecimal() or int(line) >= choices:
            raise DataError(f"{path}, line {number}: {line[:40]!r} must be a choice, 0 to {choices - 1}; mend the line")
    if len(lines) != count:
        raise DataError(f"{path} has {len(lines)} lines for {count} questions; name the labels that belong to the data")
    return [int(line) for line in lines]
