"""Marks of a batch: spans that every head keeps, those that keep a share of the budget, and dropped ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.state.spans import DroppedSpans, TextMarks
from millpond.codec.spec import Codec
from millpond.errors import DataError, OptionError
from millpond.kernels.decode_rules import in_spans
from millpond.kernels.transfers import on_device
from millpond.policy.fair_shares import BEHIND, FairSpans, Floats, Ints, fewest
from millpond.policy.policy import Policy
from millpond.prompt_marks import MAX_SHARES, PromptMarks, Span, SpanShare, kept_spans, shares_in_order, tokens_in


class KeptSpans(TextMarks[Span]):
    """Kept spans of a batch of sequences, and of the sequences of the next prompt."""

    def count(self, sequence: int, first: int = 0) -> int:
        """Return how many positions from `first` on one sequence keeps, read or not."""
        return tokens_in(self.of(sequence), first)

    def counts(self, first: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
        """Return how many positions from `first` (S,) on each sequence keeps, (S,), read or not."""
        inside = np.maximum(self._padded_spans, np.asarray(first)[..., None, None])
        counts: npt.NDArray[np.int64] = (inside[..., 1] - inside[..., 0]).sum(1)
        return counts

    def mask(self, sequence: int, positions: Tensor, first: int = 0) -> Tensor | None:
        """Return which positions (H, N), -1 for none, one sequence keeps, (H, N) bool.

        Positions before `first` are left out. None if it keeps none.
        """
        if not self.count(sequence, first):
            return None
        spans = torch.tensor(self.of(sequence), dtype=positions.dtype, device=positions.device)
        return in_spans(positions, spans.expand(len(positions), -1, -1)) & (positions >= first)

    def tensor(self, device: torch.device) -> Tensor | None:
        """Return the spans of all sequences, (S, n, 2) int32, see `StepRegions.kept`."""
        if not self:
            return None
        if device not in self._tensors:
            self._tensors[device] = on_device(self._padded_spans.astype(np.int32), device)
        return self._tensors[device]

    def _joined(self, marks: Sequence[Span]) -> tuple[Span, ...]:
        return kept_spans(marks)

    def _set(self, marks: list[tuple[Span, ...]]) -> None:
        super()._set(marks)
        max_spans = max(map(len, marks), default=0)
        rows = [[*spans, *[(0, 0)] * (max_spans - len(spans))] for spans in marks]
        self._padded_spans = np.array(rows, dtype=np.int64).reshape(len(marks), max_spans, 2)  # empty ones at the end
        self._tensors: dict[torch.device, Tensor | None] = {}


def shares_of_tensors(spans: Tensor, shares: Tensor) -> tuple[SpanShare, ...]:
    """Return the spans with shares from a file's tensors: spans (m, 2), shares (m,) float64.

    Raises:
        DataError: the tensors are not spans with shares.
    """
    are_pairs = spans.dtype in (torch.int32, torch.int64) and spans.ndim == 2 and spans.shape[1] == 2
    if not are_pairs or shares.dtype is not torch.float64 or shares.shape != spans.shape[:1] or len(spans) > MAX_SHARES:
        raise DataError("a file has no spans with shares where it should; it is read as missing")
    rows = [(begin, end, share) for (begin, end), share in zip(spans.tolist(), shares.tolist(), strict=True)]
    try:
        return shares_in_order(rows, "a file's spans with shares")
    except OptionError as error:
        raise DataError(f"{error}; the file is read as missing") from None


def kept_refusal(policy: Policy, codecs: Iterable[Codec], rolling: bool = False) -> str | None:
    """Return why spans cannot be kept and what to do instead, or None. See `fair_refusal`."""
    if (reason := policy.kept_refusal()) is not None:
        return reason
    if any(codec.ages for codec in codecs):
        return "entries pass through number formats by age; name one format"
    return "overflow='rolling' moves positions; leave one out" if rolling else None


def fair_refusal(policy: Policy, codecs: Iterable[Codec], rolling: bool = False) -> str | None:
    """Return why spans cannot have a share of the budget and what to do instead, or None.

    Args:
        policy: Policy of the cache.
        codecs: Codecs of the layers.
        rolling: Whether positions move when a text is longer than the context.
    """
    codecs = list(codecs)
    if any(codec.ages for codec in codecs):
        return "entries pass through number formats by age; name one format"
    if any(codec.tiered for codec in codecs):
        return "nothing leaves a cache with a lower tier, to which all goes that is not chosen; use another codec"
    if rolling:
        return "overflow='rolling' moves positions; leave one out"
    return policy.fair_refusal()


class FairShares(TextMarks[SpanShare]):
    """Spans with shares of a batch of sequences."""

    def _joined(self, marks: Sequence[SpanShare]) -> tuple[SpanShare, ...]:
        return shares_in_order(marks, "spans")

    def _set(self, marks: list[tuple[SpanShare, ...]]) -> None:
        super()._set(marks)
        max_spans = max(map(len, marks), default=0)
        rows = [[*spans, *[(BEHIND, BEHIND, 0.0)] * (max_spans - len(spans))] for spans in marks]
        numbers = np.array(rows, dtype=np.float64).reshape(len(marks), max_spans, 3)
        self._spans: Ints = numbers[..., :2].astype(np.int64)  # (S, m, 2)
        self._shares: Floats = numbers[..., 2]  # (S, m)

    def _seen(self, begin: Ints, end: Ints) -> Ints:
        """Return the tokens of each span among positions begin (S, 1) to end (S, 1), (S, m)."""
        inside = self._spans.clip(begin[..., None], end[..., None])
        tokens: Ints = inside[..., 1] - inside[..., 0]
        return tokens

    def least(self, seen: Ints, budgets: Ints, free: Ints, window: int, device: torch.device) -> Tensor | None:
        """Return the spans of a decoding step and how many entries of each stay, (S, m, 3) int32.

        See `StepRegions.least`; None if no sequence has spans.

        Args:
            seen: Tokens of each text, (S,).
            budgets: B of each text, (S,).
            free: F of each text, (S,).
            window: Window of the layer; 0 for all.
            device: Device of the result.
        """
        if not self:
            return None
        end = seen[:, None]
        visible = np.minimum(end, window) if window else end
        shares_in_entries = self._shares * budgets[:, None]
        count = fewest(self._seen(end - visible, end), visible, shares_in_entries, free[:, None])
        return on_device(np.concatenate([self._spans, count[..., None]], 2).astype(np.int32), device)

    def view(
        self, sequence: int, seen: int, visible: int, budget: int, aside: Tensor | None, positions: Tensor
    ) -> FairSpans | None:
        """Return the spans of one sequence for a plan; None if it has none.

        Args:
            sequence: Sequence in the batch.
            seen: Tokens of the text.
            visible: Those of them that the layer sees.
            budget: B.
            aside: Which of the entries stay whatever the plan is, (H, N) bool; None for none.
            positions: Positions of the entries, (H, N).
        """
        n = len(self.of(sequence))
        if not n:
            return None
        spans, shares = self._spans[sequence, :n], self._shares[sequence, :n]
        end = np.array([[seen]])
        tokens = self._seen(end - visible, end)[sequence, :n]
        aside_counts = torch.zeros(len(positions), n, dtype=torch.int64, device=positions.device)
        if aside is not None:
            for index, (begin, last) in enumerate(spans.tolist()):
                aside_counts[:, index] = (aside & (positions >= begin) & (positions < last)).sum(1)
        return FairSpans(spans, tokens, visible, shares * budget, aside_counts)


class BatchMarks:
    """Marks of the texts of a batch of sequences.

    Attributes:
        kept: Spans of positions that stay in every head of every layer.
        shares: Spans that keep a share of the budget there, see `millpond.policy.fair_shares`.
        dropped: Spans that no head holds any more.
    """

    def __init__(self) -> None:
        self.kept, self.shares, self.dropped = KeptSpans(), FairShares(), DroppedSpans()

    def expect(self, marks: PromptMarks) -> None:
        """Mark each sequence of the prompt that is read next."""
        self.kept.expect(marks.keep)
        self.shares.expect(marks.shares)

    def add(self, marks: PromptMarks, sequence: int) -> None:
        """Mark one sequence in addition.

        Raises:
            OptionError: spans that overlap, or too many.
        """
        self.kept.add(marks.keep, sequence)
        self.shares.add(marks.shares, sequence)

    def hold(self, marks: PromptMarks) -> bool:
        """Whether the first sequence has these kinds of marks already."""
        return bool((self.kept.of(0) or not marks.keep) and (self.shares.of(0) or not marks.shares))

    def begin(self, n_seq: int) -> None:
        """Begin a prompt of `n_seq` sequences, see `TextMarks.begin`."""
        self.kept.begin(n_seq)
        self.shares.begin(n_seq)

    def reset(self) -> None:
        """Forget all sequences; marks of the next prompt stay."""
        self.kept.reset()
        self.shares.reset()
        self.dropped.reset()

    def select(self, sequences: Sequence[int]) -> None:
        """Follow a selection or re-ordering of sequences."""
        self.kept.select(sequences)
        self.shares.select(sequences)
        self.dropped.select(sequences)

    def copy(self, sequences: Sequence[int]) -> BatchMarks:
        """Return an independent copy of the marks of some sequences."""
        other = BatchMarks()
        other.kept = self.kept.copy(sequences)
        other.shares = self.shares.copy(sequences)
        other.dropped = self.dropped.copy(sequences)
        return other

    def join(self, other: BatchMarks, n_seq: int) -> None:
        """Take the marks of the sequences of `other`, after the `n_seq` of this batch."""
        self.kept.join(other.kept)
        self.shares.join(other.shares)
        self.dropped.join(other.dropped, n_seq)
