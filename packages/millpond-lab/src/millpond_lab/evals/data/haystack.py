"""Haystack texts: sentences up to a length, with needles between them at a given depth."""

from __future__ import annotations

import itertools
import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

from millpond.errors import DataError, OptionError
from millpond_lab.evals.data.data_files import read_text
from millpond_lab.evals.data.synthetic_english import noise, prose


class Haystack:
    """The requested number of words of an endless stream of sentences."""

    def __init__(self, sentences: Iterator[str], join: str = " ") -> None:
        self._stream = sentences
        self._sentences: list[str] = []
        self._words = [0]
        self._join = join

    def sentences(self, words: int) -> list[str]:
        """Whole sentences, after the tail of one more where `words` ends inside it: a text opened somewhere."""
        while self._words[-1] < words:
            sentence = next(self._stream)
            self._sentences.append(sentence)
            self._words.append(self._words[-1] + len(sentence.split()))
        whole = bisect_right(self._words, words) - 1
        rest = words - self._words[whole]
        opening = [" ".join(self._sentences[whole].split()[-rest:])] if rest else []
        return opening + self._sentences[:whole]

    def text(self, words: int, needles: Sequence[tuple[float, str]] = ()) -> str:
        """The haystack with each (depth, needle) between two sentences; depth 0 is the beginning, 1 the end."""
        return self._join.join(place(self.sentences(words), needles))


def place(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """Needles between sentences, each where the share of characters before it is nearest to its depth.

    Needles keep their order, those of one depth too.
    """
    ends = [0, *itertools.accumulate(len(sentence) for sentence in sentences)]
    total = ends[-1] + sum(len(text) for _, text in needles)
    where: list[list[str]] = [[] for _ in ends]
    laid = least = 0
    for depth, text in sorted(needles, key=lambda needle: needle[0]):
        aim = depth * (total - len(text)) - laid  # characters of hay before it
        index = bisect_left(ends, aim)
        if index == len(ends) or (index and aim - ends[index - 1] < ends[index] - aim):
            index -= 1
        least = max(least, index)
        where[least].append(text)
        laid += len(text)
    return [*where[0], *itertools.chain.from_iterable(zip_after(sentences, where[1:]))]


def zip_after(sentences: Sequence[str], after: Sequence[list[str]]) -> Iterator[list[str]]:
    """Each sentence with what stands after it."""
    for sentence, texts in zip(sentences, after, strict=True):
        yield [sentence, *texts]


def depths(rng: random.Random, count: int) -> list[float]:
    """`count` depths between 0 and 1, in rising order."""
    return sorted(rng.random() for _ in range(count))


def read_sentences(path: str) -> list[str]:
    """The sentences of a text file, white space made even.

    Raises:
        DataError: there is no such file, or no text in it.
    """
    text = read_text(path)
    found = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text) if part.strip()]
    if not found:
        raise DataError(f"{path} holds no text; give a file with at least one sentence")
    return found


def from_book(sentences: Sequence[str], rng: random.Random) -> Iterator[str]:
    """The sentences from a drawn one on, round and round."""
    start = rng.randrange(len(sentences))
    while True:
        yield from sentences[start:]
        yield from sentences[:start]


class Source:
    """Sentences without end, a stream of its own for each sample.

    Attributes:
        kind: "noise" repeats a few sentences; "prose" varies. book: a text file instead of prose.

    Raises:
        OptionError: a book for repeated sentences.
    """

    def __init__(self, kind: Literal["noise", "prose"], book: str = "") -> None:
        self.kind, self.book = kind, book
        if kind == "noise" and book:
            raise OptionError(f"essay={book!r} is prose, and this variant repeats a few sentences; leave one out")

    @property
    def english(self) -> dict[str, tuple[str, str]]:
        """The option that names English text, as set and by default."""
        return {"essay": (self.book, "")}

    @cached_property
    def _sentences(self) -> list[str]:
        return read_sentences(self.book)

    def sentences(self, rng: random.Random) -> Iterator[str]:
        """Sentences drawn from a stream that branches off `rng`."""
        branch = random.Random(rng.getrandbits(64))
        if self.kind == "noise":
            return noise()
        return from_book(self._sentences, branch) if self.book else prose(branch)
