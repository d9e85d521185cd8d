"""Texts to train retaining heads on: rows of pond-recall's families, a text file, or JSONL with texts or questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from millpond.errors import DataError, OptionError, unknown
from millpond_lab.pond.facts import FILLERS, Facts, Words, hide, stream
from millpond_lab.pond.words import BOS_ID
from millpond_lab.train.recall.rows import SOURCES, draw_batch, facts_of

#: The name of pond-recall's families as data.
RECALL = "recall"
#: Streams of its rows by those of the run: training draws the rows that the model itself was trained on.
ROWS = {"retain": "train"}
#: Words of a text of pond-recall's families.
RECALL_LENGTHS = (256, 512, 1024)
#: Of a text without questions a random cut is taken, and its last tokens ask: one of these many.
ASKING_SHARE = 8

#: Turns a text into token ids.
Tokenize = Callable[[str], Sequence[int]]


class Asked(NamedTuple):
    """One text with its queries.

    Attributes:
        ids: (N,) int64. begin: first token of the questions and answers, whose queries give the labels.
    """

    ids: Tensor
    begin: int


class Texts(Protocol):
    """A source of texts; equal arguments give equal texts.

    Attributes:
        name: for the facts of a file and the card.
    """

    name: str

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """The text of one step of the stream `stream_name`."""
        ...


class RecallTexts:
    """Rows of pond-recall's families.

    Args:
        without: kinds of facts that are left out (see `training_rows.SOURCES`).

    Raises:
        OptionError: no such kind, or none is left.
    """

    def __init__(self, without: Iterable[str] = ()) -> None:
        left_out = set(without)
        for kind in left_out - set(SOURCES):
            raise unknown("kind of facts", kind, SOURCES)
        self._weights = np.array([kind not in left_out for kind in SOURCES], dtype=float)
        if not self._weights.any():
            raise OptionError(f"--without names all kinds of facts ({', '.join(SOURCES)}); leave one")
        self.name = "rows of pond-recall's families" + (f" without {', '.join(sorted(left_out))}" if left_out else "")

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """A row of 256, 512 or 1,024 words and its questions."""
        rng = stream("pond", stream_name, "length", seed, step)
        length = int(rng.choice(RECALL_LENGTHS))
        rows = ROWS.get(stream_name, stream_name)
        batch = draw_batch(seed, step, length=length, tokens=1, weights=self._weights, name=rows)
        return Asked(batch.tokens[0], length + 1)


class _Document(NamedTuple):
    """Token ids of a text, and of questions and answers about it, if there are any."""

    text: Tensor
    asked: Tensor


class FileTexts:
    """Random cuts of the texts of a file.

    Args:
        file: plain text; or JSONL, whose lines have `text`; or `context`, `question` and `answer`; or `messages` with
            `content`, of which the last one asks.
        shortest, longest: tokens of a cut.

    Raises:
        DataError: the file cannot be read, has no text, or none that is as long as the shortest cut.
    """

    def __init__(self, file: Path, tokenize: Tokenize, shortest: int = 256, longest: int = 1024) -> None:
        self.name = file.name
        self._longest = longest
        documents = [
            _Document(*(torch.tensor(list(tokenize(part)) if part else [], dtype=torch.int64) for part in p))
            for p in _parts(file)
        ]
        self._documents = [d for d in documents if len(d.text) >= shortest]
        self._shortest = shortest
        if not self._documents:
            most = max((len(d.text) for d in documents), default=0)
            raise DataError(
                f"{str(file)!r} has no text of {shortest} tokens, the shortest cut: its longest has {most}; give "
                "longer texts"
            )

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """A cut of a text. Its questions ask; where it has none, its last eighth."""
        rng = stream("retain", stream_name, seed, step)
        sizes = np.array([len(d.text) for d in self._documents], dtype=float)
        text, asked = self._documents[int(rng.choice(len(sizes), p=sizes / sizes.sum()))]
        most = min(len(text), max(self._longest - len(asked), self._shortest))
        length = int(rng.integers(min(self._shortest, most), most + 1))
        start = int(rng.integers(len(text) - length + 1))
        cut = text[start : start + length]
        if len(asked):
            return Asked(torch.cat([cut, asked]), length)
        return Asked(cut, length - max(1, length // ASKING_SHARE))


def _parts(file: Path) -> list[tuple[str, str]]:
    """The texts of a file, each with its questions and answers."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{str(file)!r} cannot be read as UTF-8 text: {error}") from None
    if file.suffix != ".jsonl":
        return [(content, "")] if content.strip() else []
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            found.append(_of_line(line, f"line {number} of {str(file)!r}"))
    return found


def _of_line(line: str, where: str) -> tuple[str, str]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}") from None
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return record["text"], ""
        if all(isinstance(record.get(key), str) for key in ("context", "question", "answer")):
            return record["context"], f"\n{record['question']} {record['answer']}"
        messages = record.get("messages")
        if isinstance(messages, list) and len(messages) > 1:
            contents = [m["content"] for m in messages if isinstance(m, dict) and isinstance(m.get("content"), str)]
            if len(contents) == len(messages):
                return "\n".join(contents[:-1]), "\n" + contents[-1]
    raise DataError(
        f"{where} has no text: give 'text'; or 'context', 'question' and 'answer'; or 'messages' with 'content'"
    )


#: The name of these rows as data.
SPARSE = "recall:sparse"
#: Words of a text.
LENGTH = 1024
#: Words of its facts, about; one after another.
FACT_WORDS = (8, 24, 64, 100)


class SparseRecallTexts:
    """Texts of 1,024 words with some 8 to 100 words of facts of one kind, and questions about them in random order.

    Rows of training have up to 420 words of facts, of several kinds.
    The step names kind and words in turn, so that a few texts hold all of them.

    Args:
        questions: asked of a text at most.
    """

    name = "sparse rows of pond-recall's families"

    def __init__(self, questions: int = 1) -> None:
        self._questions = questions

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """The text of one step of the stream `stream_name`, which is never one of training or of an exam."""
        rng = stream("pond", "sparse", stream_name, seed, step)
        kind, words = SOURCES[step % len(SOURCES)], FACT_WORDS[step % len(FACT_WORDS)]
        facts = facts_of(Words(rng), kind, words)
        filler = FILLERS[int(rng.integers(len(FILLERS)))]
        text = hide(rng, Facts(facts.threads, []), LENGTH, filler)
        chosen = [facts.asked[int(i)] for i in rng.permutation(len(facts.asked))[: self._questions]]
        asked = [np.array(question.question + question.answer) for question in chosen]
        row = np.concatenate([[BOS_ID], text, *asked])
        return Asked(torch.from_numpy(row.astype(np.int64)), LENGTH + 1)


#: The name of these rows as data.
MIXED = "recall:mixed"
#: Questions about a sparse text at most, as rows of training have several.
QUESTIONS = 12


class MixedRecallTexts:
    """Even steps: rows of training, of 256 to 1,024 words; odd ones: 1,024 words with few facts."""

    name = "rows of pond-recall's families and sparse ones by turns"

    def __init__(self) -> None:
        self._rows, self._sparse = RecallTexts(), SparseRecallTexts(QUESTIONS)

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """The text of one step of the stream `stream_name`."""
        source = self._sparse if step % 2 else self._rows
        return source.draw(stream_name, seed, step // 2)
