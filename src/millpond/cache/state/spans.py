"""Spans of the text of each sequence of a batch: marks that are set before reading, and dropped spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.errors import CacheMismatchError, DataError
from millpond.prompt_marks import Span, tokens_in, united


def spans_of_tensor(stored: Tensor, n_tokens: int) -> tuple[Span, ...]:
    """Spans of a text of `n_tokens` out of a file.

    Raises:
        DataError: they are no pairs of whole numbers, hold nothing, overlap, or leave the text.
    """
    if stored.dtype not in (torch.int32, torch.int64) or stored.ndim != 2 or stored.shape[1] != 2:
        raise DataError("spans in a file must be pairs of whole numbers; the file is read as missing")
    if not 0 < len(stored) <= n_tokens:
        raise DataError(f"a file has {len(stored)} spans of {n_tokens} tokens; it is read as missing")
    spans = tuple((int(begin), int(end)) for begin, end in stored.tolist())
    places = [place for span in spans for place in span]
    if not all(a < b for a, b in spans) or places != sorted(places) or not 0 <= places[0] <= places[-1] <= n_tokens:
        raise DataError("spans in a file do not lie in its text; it is read as missing")
    return spans


T = TypeVar("T")


class TextMarks(Generic[T]):
    """The marks of a batch of sequences, and those of the sequences that the next prompt begins."""

    def __init__(self) -> None:
        self._marks: list[tuple[T, ...]] = []
        self._any = False  # some sequence has some
        self._marked = np.zeros(0, dtype=bool)
        self._next: dict[int | None, tuple[T, ...]] = {}  # by sequence; None: of each

    def __bool__(self) -> bool:
        """Whether any sequence has some."""
        return self._any

    def of(self, sequence: int) -> tuple[T, ...]:
        """Those of one sequence."""
        return self._marks[sequence] if sequence < len(self._marks) else ()

    def marked(self, n_seq: int) -> npt.NDArray[np.bool_]:
        """Return which sequences have some, (n_seq,)."""
        return self._marked if self._any else np.zeros(n_seq, dtype=bool)

    # ------------------------------------------------------------------ what is marked

    def expect(self, marks: Sequence[T], sequence: int | None = None) -> None:
        """Mark the prompt that is read next; `sequence`: one of its sequences, None: each."""
        self._next[sequence] = tuple(marks)
        if not marks:
            del self._next[sequence]

    def begin(self, n_seq: int) -> None:
        """Return a prompt of `n_seq` sequences begins.

        Raises:
            CacheMismatchError: marks are expected of a sequence that it does not have.
            OptionError: spans of a sequence overlap.
        """
        beyond = [s for s in self._next if s is not None and s >= n_seq]
        if beyond:
            raise CacheMismatchError(
                f"spans of sequence {beyond[0]} are marked, and the prompt has sequences 0 to {n_seq - 1}"
            )
        every = self._next.get(None, ())
        self._set([self._joined([*every, *self._next.get(s, ())]) for s in range(n_seq)])
        self._next = {}

    def add(self, marks: Sequence[T], sequence: int) -> None:
        """Mark one sequence in addition.

        Raises:
            OptionError: spans that overlap, or too many.
        """
        found = list(self._marks)
        found[sequence] = self._joined([*found[sequence], *marks])
        self._set(found)

    def reset(self) -> None:
        """No sequence is there any more; what is expected of the next prompt stays."""
        self._set([])

    # ------------------------------------------------------------------ the batch

    def select(self, sequences: Sequence[int]) -> None:
        """Follow a choice or re-ordering of sequences."""
        self._set([self._marks[s] for s in sequences] if self._any else [()] * len(sequences))

    def copy(self, sequences: Sequence[int]) -> Self:
        """Those of some sequences, which change on their own."""
        other = type(self)()
        other._set([self.of(s) for s in sequences])
        return other

    def join(self, other: Self) -> None:
        """Take over those of the sequences of `other`, after these."""
        self._set([*self._marks, *other._marks])

    def _joined(self, marks: Sequence[T]) -> tuple[T, ...]:
        """Marks of one text in order.

        Raises:
            OptionError: they do not go together.
        """
        raise NotImplementedError

    def _set(self, marks: list[tuple[T, ...]]) -> None:
        self._marks, self._any = marks, any(marks)
        self._marked = np.array([bool(own) for own in marks], dtype=bool)


class DroppedSpans:
    """The dropped spans of a batch of sequences; each ascending and disjoint."""

    def __init__(self) -> None:
        self._spans: list[tuple[Span, ...]] = []

    def __bool__(self) -> bool:
        """Whether any sequence has some."""
        return any(self._spans)

    def of(self, sequence: int) -> tuple[Span, ...]:
        """Those of one sequence."""
        return self._spans[sequence] if sequence < len(self._spans) else ()

    def count(self, sequence: int, first: int = 0) -> int:
        """Return positions that one sequence has dropped, those before `first` left out."""
        return tokens_in(self.of(sequence), first)

    def add(self, spans: Sequence[Span], sequence: int) -> None:
        """Drop spans of one sequence in addition; they may overlap those that were dropped."""
        self._spans += [()] * (sequence + 1 - len(self._spans))
        self._spans[sequence] = united([*self._spans[sequence], *spans])

    def reset(self) -> None:
        """No sequence is there any more."""
        self._spans = []

    # ------------------------------------------------------------------ the batch

    def select(self, sequences: Sequence[int]) -> None:
        """Follow a choice or re-ordering of sequences."""
        self._spans = [self.of(s) for s in sequences] if self else []

    def copy(self, sequences: Sequence[int]) -> DroppedSpans:
        """Those of some sequences, which change on their own."""
        other = DroppedSpans()
        other._spans = [self.of(s) for s in sequences] if self else []
        return other

    def join(self, other: DroppedSpans, n_seq: int) -> None:
        """Take over those of the sequences of `other`, after the `n_seq` of this batch."""
        if other:
            self._spans += [()] * (n_seq - len(self._spans))
            self._spans += other._spans
