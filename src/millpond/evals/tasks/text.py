"""Text of a user's own: its perplexity under a budget, and how near the predictions stay to the full cache's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from millpond.errors import DataError, OptionError
from millpond.evals.draw import stream
from millpond.evals.files import read_text
from millpond.evals.from_file import refuse_pond
from millpond.evals.generated import at_least
from millpond.evals.room import Room
from millpond.evals.sample import Question, Sample
from millpond.evals.task import Kind, Task, task

_WORD, _SPACE = re.compile(r"\S"), re.compile(r"\s")

Path = Annotated[str, "a file of UTF-8 text; may end in .gz"]
Context = Annotated[int, "tokens that are compressed before the first one is predicted"]
Continuation = Annotated[int, "tokens that are then fed one by one"]
Stride = Annotated[int, "tokens from the beginning of one sample to the next"]


@task("text")
def text(
    path: Path = "", context_len: Context = 512, continuation_len: Continuation = 128, stride: Stride = 640
) -> Task:
    """Perplexity of a text, token by token after a compressed context."""
    return _build("text", "perplexity", path, context_len, continuation_len, stride)


@task("fidelity")
def fidelity(
    path: Path = "", context_len: Context = 512, continuation_len: Continuation = 128, stride: Stride = 640
) -> Task:
    """How near the predictions on a text stay to those of the full cache; needs no labels."""
    return _build("fidelity", "fidelity", path, context_len, continuation_len, stride)


def _build(name: str, kind: Kind, path: str, context: int, continuation: int, stride: int) -> Task:
    at_least(name, 1, context_len=context, continuation_len=continuation, stride=stride)
    return _Strided(name, kind, path, context, continuation, stride)


@dataclass(frozen=True)
class _Strided:
    """Windows over a text, in its order from a word that the seed names, round the end to that word again.

    Windows begin and end with whole words, so that each is tokenized as it would be alone; they hold the most words
    that fit into their tokens. A window never runs over the end of the text.
    """

    name: str
    kind: Kind
    path: str
    context: int
    continuation: int
    stride: int

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        """See `Task.samples`."""
        refuse_pond(self.name, tokenizer)
        whole, room = _read(self.path), Room(tokenizer)
        first = _find(_SPACE, whole, stream(self.name, seed).randrange(len(whole)))
        made = 0
        for begin, end in ((first, len(whole)), (0, first)):
            for sample in self._windows(whole[begin:end].rstrip(), begin, room):
                if made == count:
                    return
                made += 1
                yield sample
        if not made:
            raise DataError(
                f"{self.path} is too short for context_len={self.context} and continuation_len={self.continuation}; "
                f"lower them, or name a longer text"
            )

    def score(self, question: Question, answer: str) -> float:
        """Refused: nothing is decoded.

        Raises:
            OptionError: always.
        """
        raise OptionError(f"{self.name}: a task of the kind {self.kind} decodes no answer, so there is none to score")

    def _windows(self, whole: str, offset: int, room: Room) -> Iterator[Sample]:
        begin = 0
        while True:
            begin = _find(_WORD, whole, begin)
            context = begin + _head(room, whole, begin, self.context)
            end = context + _head(room, whole, context, self.continuation)
            if end >= len(whole):
                return
            if begin < context < end:  # no word is longer than what should hold it
                question = Question("", (whole[context:end],))
                yield Sample(str(offset + begin), whole[begin:context], (question,), {"offset": offset + begin})
            begin += _head(room, whole, begin, self.stride) or _find(_SPACE, whole, begin) - begin


def _head(room: Room, whole: str, begin: int, tokens: int) -> int:
    """Characters of the most words from `begin` that fit into `tokens`; reads ever more text until they do not."""
    width = 8 * tokens
    while True:
        part = whole[begin : begin + width]
        fits = room.head(part, tokens)
        if fits < len(part.rstrip()) - 64 or begin + width >= len(whole):
            return fits
        width *= 2


def _read(path: str) -> str:
    if not path:
        raise DataError("this task reads a text file, and none was named; add path=FILE to its options")
    whole = read_text(path).strip()
    if not whole:
        raise DataError(f"{path} holds no text; name a file with some")
    return whole


def _find(what: re.Pattern[str], whole: str, place: int) -> int:
    """Where `what` comes next, from `place` on; the end if it does not."""
    match = what.search(whole, place)
    return match.start() if match else len(whole)
