"""Spans of each sequence's text whose entries were dropped from every head of every layer, with later text behind them.

Positions of later tokens stay as they are, so that a sequence has seen more tokens than could be held.
"""

from __future__ import annotations

from collections.abc import Sequence

from millpond.cache.state.spans import Span, tokens_in, united


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
        """Positions that one sequence has dropped, those before `first` left out."""
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
