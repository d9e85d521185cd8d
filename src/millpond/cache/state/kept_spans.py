"""Spans of each sequence's text whose entries every head of every layer keeps, whatever its method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.state.spans import Span, ascending, tokens_in, united
from millpond.cache.state.text_marks import TextMarks
from millpond.errors import OptionError
from millpond.kernels.decode_rules import in_spans

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


class KeptSpans(TextMarks[Span]):
    """The kept spans of a batch of sequences, and those of the sequences that the next prompt begins."""

    def count(self, sequence: int, first: int = 0) -> int:
        """Positions that one sequence keeps, read or not, those before `first` left out."""
        return tokens_in(self.of(sequence), first)

    def counts(self, first: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
        """(S,) positions that each sequence keeps, read or not, those before `first` (S,) left out."""
        inside = np.maximum(self._places, np.asarray(first)[..., None, None])
        found: npt.NDArray[np.int64] = (inside[..., 1] - inside[..., 0]).sum(1)
        return found

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
        if not self:
            return None
        if device not in self._tensors:
            self._tensors[device] = torch.from_numpy(self._places.astype(np.int32)).to(device)
        return self._tensors[device]

    def _joined(self, marks: Sequence[Span]) -> tuple[Span, ...]:
        return kept_spans(marks)

    def _set(self, marks: list[tuple[Span, ...]]) -> None:
        super()._set(marks)
        most = max(map(len, marks), default=0)
        rows = [[*spans, *[(0, 0)] * (most - len(spans))] for spans in marks]
        self._places = np.array(rows, dtype=np.int64).reshape(len(marks), most, 2)  # empty ones at the end
        self._tensors: dict[torch.device, Tensor | None] = {}
