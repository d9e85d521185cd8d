"""Tasks whose samples are made, not read: the frame that fills each to its length and asks `pond` where it speaks.

A task of this kind only writes drafts. How long a draft becomes, for which tokenizer, in whose language and from which
random stream is decided here, once.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.metrics import found
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind

#: Default number of digits, as in RULER.
SEVEN = 7


def stream(*names: object) -> random.Random:
    """A random stream of its own for these names, the same on every machine.

    Example:
        >>> stream("recall", 7, 0).random() == stream("recall", 7, 0).random()
        True
        >>> stream("recall", 7, 0).random() == stream("recall", 7, 1).random()
        False
    """
    text = "\x1f".join(str(name) for name in names)
    return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))


def number(rng: random.Random, digits: int = SEVEN) -> str:
    """A number of exactly `digits` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def identifier(rng: random.Random) -> str:
    """A version 4 UUID drawn from `rng`."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def letters(rng: random.Random, size: int) -> str:
    """`size` lower-case letters."""
    return "".join(rng.choices(string.ascii_lowercase, k=size))


#: A word with the white space before it, so that joined words are the text again.
_WORD = re.compile(r"\s*\S+")


class TokenBudget:
    """Counts tokens of prompts as they will be run: the context with its start mark, then a question."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def tokens(self, text: str, start: bool = False) -> int:
        """Tokens of `text`; with `start`, of a prompt that begins with it."""
        return len(self.tokenizer(text, add_special_tokens=start, verbose=False)["input_ids"])

    def prompt(self, context: str, questions: Sequence[str]) -> int:
        """Tokens of the context and the longest question."""
        return self.tokens(context, start=True) + max(map(self.tokens, questions))

    def cut_middle(self, text: str, limit: int) -> str:
        """`text`, or its beginning and end, in whole words, with at most `limit` tokens.

        Raises:
            OptionError: not even a word at each end fits.
        """
        if self.tokens(text, start=True) <= limit:
            return text
        parts = _WORD.findall(text)

        def ends(keep: int) -> str:
            return "".join(parts[: keep - keep // 2]) + "".join(parts[len(parts) - keep // 2 :])

        keep = largest_fitting(lambda n: self.tokens(ends(n), start=True), limit, len(parts))
        if keep < 2:
            raise OptionError(f"no text is left in the {max(limit, 0)} tokens besides the question; raise max_tokens")
        return ends(keep)

    def head(self, text: str, limit: int) -> int:
        """Characters of the longest run of whole words from the beginning that has at most `limit` tokens."""
        ends = [0, *(match.end() for match in _WORD.finditer(text))]
        return ends[largest_fitting(lambda n: self.tokens(text[: ends[n]]), limit, len(ends) - 1)]


def largest_fitting(size: Callable[[int], int], limit: int, most: int | None = None) -> int:
    """The largest n up to `most` with `size(n) <= limit`, -1 if not even 0 fits; `size` must not shrink.

    Sizes are interpolated, since they grow about evenly: a handful of calls where bisection needs a dozen.

    Example:
        >>> largest_fitting(lambda n: 3 * n, 100)
        33
    """
    empty = size(0)
    if empty > limit:
        return -1
    low, low_size = 0, empty
    high, high_size = (None if most is None else most + 1), 0
    guess, turn = 64, 0
    while high is None or high - low > 1:
        guess = max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)
        found = size(guess)
        if found <= limit:
            low, low_size = guess, found
        else:
            high, high_size = guess, found
        turn += 1
        if high is None or high_size == 0:
            guess = low + int((limit - low_size) * low / max(low_size - empty, 1) * 1.02) + 1
        elif turn % 3 == 0:
            guess = (low + high) // 2
        else:
            guess = low + (high - low) * (limit - low_size) // max(high_size - low_size, 1)
    return low


@dataclass(frozen=True)
class Draft:
    """A sample before its length is known.

    Attributes:
        context: the context with n words (or list entries) of filling; longer for a larger n.
        questions: their `max_new_tokens` is set by the frame.
        facts: of the sample. length: tokens of this sample, where it is not the task's.
        most: the largest n there is, None where filling never ends.
        written: `Sample.written`, of n words (or entries) like the context; None: nothing is written.
        least_answer: tokens that an answer has at least, where it is a sentence around its references.
    """

    context: Callable[[int], str]
    questions: tuple[Question, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    length: int | None = None
    most: int | None = None
    written: Callable[[int], str] | None = None
    least_answer: int = 0


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
        questions = tuple(
            replace(q, max_new_tokens=max(_answer_room(room, q), draft.least_answer)) for q in draft.questions
        )
        asked = max(room.tokens(question.text) + question.max_new_tokens for question in questions)

        def size(grains: int) -> int:
            written = room.tokens(draft.written(grains)) if draft.written else 0
            return room.tokens(draft.context(grains), start=True) + written + asked

        grains = largest_fitting(size, length, draft.most)
        if grains < 0:
            raise OptionError(
                f"{self.name}: what must be in the text, the question and its answer need {size(0)} tokens, and length "
                f"is {length}; raise length, or hide less"
            )
        if grains == draft.most:
            raise OptionError(f"{self.name}: there are only {draft.most} words to fill length={length}; lower length")
        written = draft.written(grains) if draft.written else ""
        return Sample(name, draft.context(grains), questions, {"length": length, **draft.facts}, written=written)


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
