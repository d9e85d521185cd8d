"""Tasks whose samples are made, not read: the frame that fills each to its length and asks `pond` where it speaks.

A task of this kind only writes drafts. How long a draft becomes, for which tokenizer, in whose language and from which
random stream is decided here, once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.data.random_streams import stream
from millpond_lab.evals.data.token_budget import TokenBudget, largest_fitting
from millpond_lab.evals.metrics import found
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind


@dataclass(frozen=True)
class Draft:
    """A sample before its length is known.

    Attributes:
        context: the context with n words (or list entries) of filling; longer for a larger n.
        questions: their `max_new_tokens` is set by the frame.
        facts: of the sample. length: tokens of this sample, where it is not the task's.
        most: the largest n there is, None where filling never ends.
    """

    context: Callable[[int], str]
    questions: tuple[Question, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    length: int | None = None
    most: int | None = None


@dataclass(frozen=True)
class GeneratedTask:
    """A task made of drafts.

    Attributes:
        name: of the task. length: tokens of context, question and answer together, as RULER counts.
        write: draws the draft of sample i from the stream of that sample.
        knobs: options that the task has in the language of `pond-recall` too; None is left to that language.
        english: options that it has in English only, with their default values.
        grade: what an answer is worth, from the references and the answer.
    """

    name: str
    length: int
    write: Callable[[random.Random, int], Draft]
    knobs: Mapping[str, Any] = field(default_factory=dict)
    english: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    grade: Callable[[Sequence[str], str], float] = found
    kind: Kind = "generate"

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        """See `Task.samples`."""
        if pond_tasks.speaks_pond(tokenizer):
            for name, (value, default) in self.english.items():
                if value != default:
                    raise OptionError(
                        f"{self.name}: {name}={value!r} is for English text; leave it out for pond-recall"
                    )
            yield from self.in_pond(count, seed)
            return
        room = TokenBudget(tokenizer)
        for index in range(count):
            draft = self.write(stream(self.name, seed, index), index)
            yield self._filled(room, draft, f"{seed}-{index}")

    def score(self, question: Question, answer: str) -> float:
        """See `Task.score`."""
        return self.grade(question.references, answer)

    def in_pond(self, count: int, seed: int) -> Iterator[Sample]:
        """The samples in the language of `pond-recall`."""
        knobs = {name: value for name, value in self.knobs.items() if value is not None}
        return pond_tasks.pond_samples(self.name, count, seed, length=self.length, **knobs)

    def _filled(self, room: TokenBudget, draft: Draft, name: str) -> Sample:
        length = draft.length or self.length
        questions = tuple(replace(q, max_new_tokens=_answer_room(room, q)) for q in draft.questions)
        asked = max(room.tokens(question.text) + question.max_new_tokens for question in questions)

        def size(grains: int) -> int:
            return room.tokens(draft.context(grains), start=True) + asked

        grains = largest_fitting(size, length, draft.most)
        if grains < 0:
            raise OptionError(
                f"{self.name}: what must be in the text, the question and its answer need {size(0)} tokens, and length "
                f"is {length}; raise length, or hide less"
            )
        if grains == draft.most:
            raise OptionError(f"{self.name}: there are only {draft.most} words to fill length={length}; lower length")
        return Sample(name, draft.context(grains), questions, {"length": length, **draft.facts})


class EnglishTask(GeneratedTask):
    """A task that has no form in the language of `pond-recall`."""

    def in_pond(self, count: int, seed: int) -> Iterator[Sample]:
        """Refused.

        Raises:
            OptionError: always.
        """
        raise OptionError(f"{self.name}: pond-recall knows none of its words; name another model, or the task recall")


def _answer_room(room: TokenBudget, question: Question) -> int:
    """Tokens for an answer that names every reference, half as many again, and a few words around them."""
    return room.tokens(" ".join(question.references)) * 3 // 2 + 16


def at_least(owner: str, least: int, **options: int) -> None:
    """Check that each option is at least `least`.

    Raises:
        OptionError: one is smaller.
    """
    for name, value in options.items():
        if value < least:
            raise OptionError(f"{owner}: {name}={value} must be at least {least}")


def at_most(owner: str, name: str, value: int, limit: str, most: int) -> None:
    """Check that an option is not above what another one allows.

    Raises:
        OptionError: it is.
    """
    if value > most:
        raise OptionError(f"{owner}: {name}={value} is more than {limit}={most}; lower {name} or raise {limit}")


def one_of(owner: str, among: Sequence[int], **options: int) -> None:
    """Check that each option is one of some numbers.

    Raises:
        OptionError: one is not.
    """
    for name, value in options.items():
        if value not in among:
            raise OptionError(f"{owner}: {name}={value} must be one of {', '.join(map(str, among))}")
