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
    """Return the spans of a text of `n_tokens` from a file's tensor.

    Raises:
        DataError: they are no pairs of whole numbers, hold nothing, overlap, or leave the text.
    """
    if stored.dtype not in (torch.int32, torch.int64) or stored.ndim != 2 or stored.shape[1] != 2:
        raise DataError("spans in a file must be pairs of whole numbers; the file is read as missing")
    if not 0 < len(stored) <= n_tokens:
        raise DataError(f"a file has {len(stored)} spans of {n_tokens} tokens; it is read as missing")
    spans = tuple((int(begin), int(end)) for begin, end in stored.tolist())
    bounds = [bound for span in spans for bound in span]
    if not all(a < b for a, b in spans) or bounds != sorted(bounds) or not 0 <= bounds[0] <= bounds[-1] <= n_tokens:
        raise DataError("spans in a file do not lie in its text; it is read as missing")
    return spans


T = TypeVar("T")


class TextMarks(Generic[T]):
    """Marks of a batch of sequences, and of the sequences of the next prompt."""

    def __init__(self) -> None:
        self._marks: list[tuple[T, ...]] = []
        self._any = False  # some sequence has some
        self._marked = np.zeros(0, dtype=bool)
        self._next: dict[int | None, tuple[T, ...]] = {}  # by sequence; None: of each

    def __bool__(self) -> bool:
        """Whether any sequence has marks."""
        return self._any

    def of(self, sequence: int) -> tuple[T, ...]:
        """Return the marks of one sequence."""
        return self._marks[sequence] if sequence < len(self._marks) else ()

    def marked(self, n_seq: int) -> npt.NDArray[np.bool_]:
        """Return which sequences have marks, (n_seq,)."""
        return self._marked if self._any else np.zeros(n_seq, dtype=bool)

    # ------------------------------------------------------------------ what is marked

    def expect(self, marks: Sequence[T], sequence: int | None = None) -> None:
        """Mark the prompt that is read next: one of its sequences, or each for None."""
        self._next[sequence] = tuple(marks)
        if not marks:
            del self._next[sequence]

    def begin(self, n_seq: int) -> None:
        """Begin a prompt of `n_seq` sequences.

        Raises:
            CacheMismatchError: marks are expected of a sequence that it does not have.
            OptionError: spans of a sequence overlap.
        """
        beyond = [s for s in self._next if s is not None and s >= n_seq]
        if beyond:
            raise CacheMismatchError(
                f"spans of sequence {beyond[0]} are marked, and the prompt has sequences 0 to {n_seq - 1}"
            )
        common_marks = self._next.get(None, ())
        self._set([self._joined([*common_marks, *self._next.get(s, ())]) for s in range(n_seq)])
        self._next = {}

    def add(self, marks: Sequence[T], sequence: int) -> None:
        """Mark one sequence in addition.

        Raises:
            OptionError: spans that overlap, or too many.
        """
        all_marks = list(self._marks)
        all_marks[sequence] = self._joined([*all_marks[sequence], *marks])
        self._set(all_marks)

    def reset(self) -> None:
        """Forget all sequences; marks of the next prompt stay."""
        self._set([])

    # ------------------------------------------------------------------ the batch

    def select(self, sequences: Sequence[int]) -> None:
        """Follow a selection or re-ordering of sequences."""
        self._set([self._marks[s] for s in sequences] if self._any else [()] * len(sequences))

    def copy(self, sequences: Sequence[int]) -> Self:
        """Return an independent copy of the marks of some sequences."""
        other = type(self)()
        other._set([self.of(s) for s in sequences])
        return other

    def join(self, other: Self) -> None:
        """Take the marks of the sequences of `other`, after these."""
        self._set([*self._marks, *other._marks])

    def _joined(self, marks: Sequence[T]) -> tuple[T, ...]:
        """Return the marks of one text in order.

        Raises:
            OptionError: they cannot be combined.
        """
        raise NotImplementedError

    def _set(self, marks: list[tuple[T, ...]]) -> None:
        self._marks, self._any = marks, any(marks)
        self._marked = np.array([bool(sequence_marks) for sequence_marks in marks], dtype=bool)


class DroppedSpans:
    """Dropped spans of a batch of sequences; each ascending and disjoint."""

    def __init__(self) -> None:
        self._spans: list[tuple[Span, ...]] = []

    def __bool__(self) -> bool:
        """Whether any sequence has dropped spans."""
        return any(self._spans)

    def of(self, sequence: int) -> tuple[Span, ...]:
        """Return the dropped spans of one sequence."""
        return self._spans[sequence] if sequence < len(self._spans) else ()

    def count(self, sequence: int, first: int = 0) -> int:
        """Return how many positions from `first` on one sequence has dropped."""
        return tokens_in(self.of(sequence), first)

    def add(self, spans: Sequence[Span], sequence: int) -> None:
        """Drop more spans of one sequence; they may overlap those that were dropped."""
        self._spans += [()] * (sequence + 1 - len(self._spans))
        self._spans[sequence] = united([*self._spans[sequence], *spans])

    def reset(self) -> None:
        """Forget all sequences."""
        self._spans = []

    # ------------------------------------------------------------------ the batch

    def select(self, sequences: Sequence[int]) -> None:
        """Follow a selection or re-ordering of sequences."""
        self._spans = [self.of(s) for s in sequences] if self else []

    def copy(self, sequences: Sequence[int]) -> DroppedSpans:
        """Return an independent copy of the dropped spans of some sequences."""
        other = DroppedSpans()
        other._spans = [self.of(s) for s in sequences] if self else []
        return other

    def join(self, other: DroppedSpans, n_seq: int) -> None:
        """Take the dropped spans of the sequences of `other`, after the `n_seq` of this batch."""
        if other:
            self._spans += [()] * (n_seq - len(self._spans))
            self._spans += other._spans
