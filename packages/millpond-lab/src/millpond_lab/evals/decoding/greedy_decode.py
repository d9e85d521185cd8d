"""Greedy decoding with the evicting cache, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond_lab.evals.decoding.batch import BatchReader
from millpond_lab.evals.sample import Question


@dataclass(frozen=True, slots=True)
class Answer:
    """What a row said.

    Attributes:
        text: without special tokens and without the stop text. tokens: how many were decoded.
        ended: by a stop text or the model's end of text, not by a limit.
        cut_short: the model's positions ran out before the question's limit was reached.
    """

    text: str
    tokens: int
    ended: bool
    cut_short: bool


@dataclass(slots=True)
class _Line:
    """One answer in the making."""

    question: Question
    most: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    at_eos: bool = False

    @property
    def done(self) -> bool:
        return self.ended or len(self.ids) >= self.most

    def take(self, token: int, tokenizer: PreTrainedTokenizerBase, eos: frozenset[int]) -> None:
        self.ids.append(token)
        self.at_eos = token in eos
        self.ended = self.at_eos
        if self.question.stop or self.done:
            text = str(tokenizer.decode(self.ids, skip_special_tokens=True))
            self.text, stopped = before_stop(text, self.question.stop)
            self.ended |= stopped

    def answer(self) -> Answer:
        cut_short = not self.ended and self.most < self.question.max_new_tokens
        return Answer(self.text, len(self.ids), self.ended, cut_short)


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of the stop texts, and whether there was one.

    Example:
        >>> before_stop("42. And", ["?", "."]), before_stop("42", ["."])
        (('42', True), ('42', False))
    """
    places = [text.index(stop) for stop in stops if stop and stop in text]
    return (text[: min(places)], True) if places else (text, False)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a text: those that `generate` would stop at, else the tokenizer's."""
    settings = model.generation_config
    named = settings.eos_token_id if settings is not None else None
    if named is None:
        named = tokenizer.eos_token_id
    if named is None:
        return frozenset()
    return frozenset(named if isinstance(named, list | tuple) else [int(named)])


def decode(
    reader: BatchReader,
    questions: Sequence[Question | None],
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    limit: int | None,
) -> list[Answer | None]:
    """Answer the question that each row has just read; None where nothing is asked.

    Every token but the last of an answer is read in a decoding step. The last one is left pending, unless it ends
    the text, so that a later turn continues from the whole answer.
    """
    lines = [
        None if question is None else _Line(question, _most(question, reader.seen[row], limit))
        for row, question in enumerate(questions)
    ]
    going = {row: line for row, line in enumerate(lines) if line is not None}
    while going:
        best = reader.logits.argmax(-1).tolist()
        for row, line in list(going.items()):
            line.take(int(best[row]), tokenizer, eos)
            if line.done:
                reader.pending[row] = [] if line.at_eos else [line.ids[-1]]
                del going[row]
        reader.feed([[lines_row.ids[-1]] if (lines_row := going.get(row)) else [] for row in range(reader.n_rows)])
    return [None if line is None else line.answer() for line in lines]


def _most(question: Question, seen: int, limit: int | None) -> int:
    """Tokens that may be decoded: the last one is not read, so it needs no position."""
    return question.max_new_tokens if limit is None else min(question.max_new_tokens, limit - seen + 1)
