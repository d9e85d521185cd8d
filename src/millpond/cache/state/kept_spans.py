"""Spans of each sequence's text whose entries every head of every layer keeps, whatever its method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millpond.cache.state.spans import Span, ascending, tokens_in, united
from millpond.errors import CacheMismatchError, OptionError
from millpond.kernels.eviction import in_spans

#: A position is an int32.
_LAST = 2**31 - 1
#: Most spans of one text that do not touch: each decoding step compares every entry with every span.
MOST_KEPT = 64


def kept_spans(spans: Sequence[Sequence[int]], name: str = "spans") -> tuple[Span, ...]:
    """Spans as they are kept: ascending, with those that touch joined, and none of them empty.

    Args:
        spans: [begin, end) of each, in any order. name: what a message calls them.

    Raises:
        OptionError: something else than pairs of whole numbers, a span that ends before it begins, spans that
            overlap, or more than `MOST_KEPT` that do not touch.

    Example:
        >>> kept_spans([(8, 12), (0, 4), (4, 6)])
        ((0, 6), (8, 12))
    """
    given = ascending(spans, name)
    for begin, end in given:
        if not 0 <= begin <= end <= _LAST:
            raise OptionError(f"{name}: {(begin, end)} is no span: give (begin, end) with 0 <= begin <= end")
    joined = united(given)
    if len(joined) > MOST_KEPT:
        raise OptionError(f"{name}: {len(joined)} spans that do not touch are more than {MOST_KEPT}; join some of them")
    return joined


class KeptSpans:
    """The kept spans of a batch of sequences, and those of the sequences that the next prompt begins."""

    def __init__(self) -> None:
        self._spans: list[tuple[Span, ...]] = []
        self._any = False  # some sequence keeps some
        self._next: dict[int | None, tuple[Span, ...]] = {}  # by sequence; None: of each
        self._tensors: dict[torch.device, Tensor | None] = {}

    def of(self, sequence: int) -> tuple[Span, ...]:
        """Those of one sequence."""
        return self._spans[sequence] if sequence < len(self._spans) else ()

    def count(self, sequence: int, first: int = 0) -> int:
        """Positions that one sequence keeps, read or not, those before `first` left out."""
        return tokens_in(self.of(sequence), first)

    def mask(self, sequence: int, positions: Tensor, first: int = 0) -> Tensor | None:
        """(H, N) bool: which positions (H, N), -1 for none, one sequence keeps; None where it keeps none.

        first: positions before it are left out.
        """
        if not self.count(sequence, first):
            return None
        spans = torch.tensor(self.of(sequence), dtype=positions.dtype, device=positions.device)
        return in_spans(positions, spans.expand(len(positions), -1, -1)) & (positions >= first)

    def tensor(self, device: torch.device) -> Tensor | None:
        """(S, n, 2) int32: see `StepRegions.kept`."""
        if not self._any:
            return None
        if device not in self._tensors:
            most = max(map(len, self._spans))
            rows = [[*spans, *[(0, 0)] * (most - len(spans))] for spans in self._spans]
            self._tensors[device] = torch.tensor(rows, dtype=torch.int32, device=device)
        return self._tensors[device]

    # ------------------------------------------------------------------ what is kept

    def expect(self, spans: Sequence[Span], sequence: int | None = None) -> None:
        """Keep spans of the prompt that is read next; `sequence`: of one of its sequences, None: of each."""
        self._next[sequence] = tuple(spans)
        if not spans:
            del self._next[sequence]

    def begin(self, n_seq: int) -> None:
        """A prompt of `n_seq` sequences begins.

        Raises:
            CacheMismatchError: spans are expected of a sequence that it does not have.
            OptionError: spans of a sequence overlap.
        """
        beyond = [s for s in self._next if s is not None and s >= n_seq]
        if beyond:
            raise CacheMismatchError(
                f"spans of sequence {beyond[0]} are kept, and the prompt has sequences 0 to {n_seq - 1}"
            )
        every = self._next.get(None, ())
        self._set([kept_spans([*every, *self._next.get(s, ())]) for s in range(n_seq)])
        self._next = {}

    def add(self, spans: Sequence[Span], sequence: int) -> None:
        """Keep spans of one sequence besides those that it keeps.

        Raises:
            OptionError: spans that overlap, or too many.
        """
        found = list(self._spans)
        found[sequence] = kept_spans([*found[sequence], *spans])
        self._set(found)

    def reset(self) -> None:
        """No sequence is there any more; what is expected of the next prompt stays."""
        self._set([])

    # ------------------------------------------------------------------ the batch

    def select(self, sequences: Sequence[int]) -> None:
        """Follow a choice or re-ordering of sequences."""
        self._set([self._spans[s] for s in sequences] if self._any else [()] * len(sequences))

    def copy(self, sequences: Sequence[int]) -> KeptSpans:
        """Those of some sequences, which change on their own."""
        other = KeptSpans()
        other._set([self.of(s) for s in sequences])
        return other

    def join(self, other: KeptSpans) -> None:
        """Take over those of the sequences of `other`, after these."""
        self._set([*self._spans, *other._spans])

    def _set(self, spans: list[tuple[Span, ...]]) -> None:
        self._spans, self._any = spans, any(spans)
        self._tensors = {}
