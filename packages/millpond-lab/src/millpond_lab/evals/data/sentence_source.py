"""Sources of a haystack's sentences: generated, or a user's file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from typing import Literal

from millpond.errors import OptionError
from millpond_lab.evals.data.haystack import from_book, read_sentences
from millpond_lab.evals.data.synthetic_english import noise, prose


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
