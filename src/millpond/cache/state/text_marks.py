"""Marks of each sequence's text that are set before it is read, and follow the sequences of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from millpond.errors import CacheMismatchError

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
        """(n_seq,): which sequences have some."""
        return self._marked if self._any else np.zeros(n_seq, dtype=bool)

    # ------------------------------------------------------------------ what is marked

    def expect(self, marks: Sequence[T], sequence: int | None = None) -> None:
        """Mark the prompt that is read next; `sequence`: one of its sequences, None: each."""
        self._next[sequence] = tuple(marks)
        if not marks:
            del self._next[sequence]

    def begin(self, n_seq: int) -> None:
        """A prompt of `n_seq` sequences begins.

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
