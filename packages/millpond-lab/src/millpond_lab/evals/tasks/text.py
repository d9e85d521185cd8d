"""Text of a user's own: its perplexity under a budget, and how near the predictions stay to the full cache's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from millpond.errors import DataError, OptionError
from millpond.inspector.token_text import encode_pieces
from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.data_files import read_text, refuse_pond
from millpond_lab.evals.data.generated_task import at_least, stream
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind, Task, task

_WORD, _SPACE, _BEGIN = re.compile(r"\S"), re.compile(r"\s"), re.compile(r"(?<=\s)\S")

Path = Annotated[str, "a file of UTF-8 text; may end in .gz"]
Context = Annotated[int, "tokens that are compressed before the first one is predicted", SOME_POSITIONS]
Continuation = Annotated[int, "tokens that are then fed one by one", SOME_POSITIONS]
Stride = Annotated[int, "tokens from the beginning of one sample to the next", SOME_POSITIONS]


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

    Windows begin with a word, the last one that `stride` tokens lead to (where a word is longer than that, inside it),
    and are cut at tokens: each has all the tokens that were requested. A window never runs over the end of the text.
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
        whole = _read(self.path)
        first = _find(_SPACE, whole, stream(self.name, seed).randrange(len(whole)))
        made = 0
        for begin, end in ((first, len(whole)), (0, first)):
            for sample in self._windows(whole[begin:end].rstrip(), begin, tokenizer):
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
        """Raise: this task decodes no answers.

        Raises:
            OptionError: always.
        """
        raise OptionError(f"{self.name}: a task of the kind {self.kind} decodes no answer, so there is none to score")

    def _windows(self, whole: str, offset: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sample]:
        begin = _find(_WORD, whole, 0)
        while begin < len(whole):
            ids, ends = _head(tokenizer, whole, begin, max(self.context + self.continuation, self.stride))
            if len(ids) < self.context + self.continuation:
                return
            at = ends[self.context - 1], ends[self.context + self.continuation - 1]
            fed = ids[self.context : self.context + self.continuation]
            question = Question("", (whole[at[0] : at[1]],), tokens=fed)
            name, facts = str(offset + begin), {"offset": offset + begin}
            yield Sample(name, whole[begin : at[0]], (question,), facts, ids[: self.context])
            if len(ends) < self.stride:
                return
            begin = _next(whole, begin, ends[self.stride - 1])


def _head(
    tokenizer: PreTrainedTokenizerBase, whole: str, begin: int, tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first `tokens` tokens of the text from `begin` on, and where each ends; fewer where the text ends.

    Reads ever more text until its last word, whose tokens the text after it may change, is not among them.
    """
    width = 8 * tokens
    while True:
        last = begin + width >= len(whole)
        part = whole[begin : begin + width]
        coded = encode_pieces(tokenizer, part, special_tokens=False)
        ends = tuple(begin + end for end in accumulate(map(len, coded.pieces)))
        safe = len(whole) if last else begin + max(part.rfind(" "), part.rfind("\n"), len(part) - 64)
        if last or (len(ends) > tokens and ends[tokens] <= safe):
            return coded.ids[:tokens], ends[:tokens]
        width *= 2


def _next(whole: str, begin: int, end: int) -> int:
    """Where the last word begins that begins behind `begin` and not behind `end`; `end` if there is none."""
    at = _find(_WORD, whole, end)
    if end == 0 or whole[end - 1].isspace() or at > end:
        return at
    words = [match.start() for match in _BEGIN.finditer(whole, begin + 1, end)]
    return words[-1] if words else max(end, begin + 1)


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
