"""Positions of the tokens of each forward pass, counted once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.state.span_marks import BatchMarks
from millpond.cache.state.token_ids import TokenIds
from millpond.errors import CacheMismatchError
from millpond.kernels.transfers import on_device

#: Parts of one pass (draft tokens) that are remembered.
MAX_PARTS = 1024


@dataclass(frozen=True, slots=True)
class ForwardSpan:
    """New tokens of one forward pass.

    Attributes:
        start: Columns (pads included) before this pass.
        length: Columns of this pass.
        before: Real tokens of each sequence before this pass, (S,).
        after: Real tokens of each sequence after this pass, (S,).
        valid: (S, length) bool on the host, or None if no column is a pad.
        device: Device of the layer that attends.
        q_pos: Position of each new token, (S,) int32 on the device, -1 for a pad; only for a pass of one column.
        begun: Whether every sequence had tokens before this pass.
    """

    start: int
    length: int
    before: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_] | None
    device: torch.device
    q_pos: Tensor | None
    begun: bool

    def on(self, device: torch.device) -> ForwardSpan:
        """Return the pass with its positions on another device."""
        q_pos = None
        if self.length == 1:
            q_pos = on_device(self.token(0).astype(np.int32), device)
        return replace(self, device=device, q_pos=q_pos)

    @property
    def decoding(self) -> npt.NDArray[np.bool_]:
        """Whether this pass adds exactly the next token to a sequence that has some, (S,)."""
        brings_one: npt.NDArray[np.bool_] = self.after == self.before + 1
        return brings_one & (self.before > 0)

    def first_columns(self) -> npt.NDArray[np.int64]:
        """Return the first column with a token of each sequence, (S,); 0 if there is none."""
        return np.zeros(len(self.before), dtype=np.int64) if self.valid is None else self.valid.argmax(1)

    def columns(self, sequence: int) -> slice | Tensor:
        """Return the columns of this pass with tokens of `sequence`."""
        if self.valid is None:
            return slice(0, self.length)
        columns = np.flatnonzero(self.valid[sequence])
        if len(columns) == 0:
            return slice(0, 0)
        if columns[-1] - columns[0] + 1 == len(columns):
            return slice(int(columns[0]), int(columns[-1]) + 1)
        return on_device(columns, self.device)

    def positions(self, sequence: int) -> Tensor:
        """Return the positions of the tokens in `columns(sequence)`, (n,) int32."""
        return torch.arange(
            int(self.before[sequence]), int(self.after[sequence]), dtype=torch.int32, device=self.device
        )

    def grid(self) -> Tensor:
        """Return the position of each token of this pass, (S, length) int32, -1 for pads."""
        valid = np.ones((len(self.before), self.length), dtype=bool) if self.valid is None else self.valid
        positions = np.where(valid, self.before[:, None] + valid.cumsum(1) - 1, -1)
        return on_device(positions.astype(np.int32), self.device)

    def token(self, column: int) -> npt.NDArray[np.int64]:
        """Return the position of each sequence's token in one column, (S,); -1 for a pad."""
        if self.valid is None:
            return self.before + column if column else self.before
        return np.where(self.valid[:, column], self.before + self.valid[:, :column].sum(1), -1)


class PositionTracker:
    """Real tokens seen per sequence, and columns (pads included) seen by the whole batch.

    Attributes:
        seen: Position of each sequence's next token, (S,).
        closed: Positions before it that closed gaps removed, (S,): `seen + closed` tokens were read.
        origin: Sequence of the first pass that each sequence comes from, (S,).
        columns: Columns seen so far.
        marks: Spans of positions that stay, that keep a share of the budget, or that were dropped.
        tokens: Ids of the tokens, if a policy reads them; else None.
    """

    def __init__(self) -> None:
        self.seen: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.closed: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.origin: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # which sequence of the first pass each is
        self.columns = 0
        self.marks = BatchMarks()
        self.tokens: TokenIds | None = None  # set where a policy reads them
        self._moved: tuple[ForwardSpan, ForwardSpan] | None = None  # the last pass, and the same on the other device
        self._spans: dict[tuple[int, int], ForwardSpan] = {}  # of the running pass, which may be processed in parts
        self._padded: list[tuple[int, npt.NDArray[np.bool_]]] = []  # start and `valid` of the passes that held pads

    @property
    def n_seq(self) -> int:
        """Sequences in the batch, 0 before the first pass."""
        return len(self.seen)

    def begin_pass(self, ids: Tensor | None = None) -> None:
        """Begin a forward pass: no layer may take the parts of an earlier one for its own.

        Args:
            ids: Ids of its tokens, (S, columns), if they are known.
        """
        self._spans.clear()
        if self.tokens is not None:
            self.tokens.expect(ids, self.columns)

    def span(self, start: int, length: int, n_seq: int, mask: Tensor | None, device: torch.device) -> ForwardSpan:
        """Return the pass that begins after `start` columns.

        The first layer opens it, the others share it.

        Args:
            start: Columns that the layer has seen.
            length: Columns of the pass.
            n_seq: Sequences in the pass.
            mask: (n_seq, >= length) bool; the newest `length` columns are True for tokens and False for pads; None for
                no pads.
            device: Device of the layer: the model's, or the host where its entries are there.

        Raises:
            CacheMismatchError: another batch size, layers that are out of step, or a mask that hides earlier tokens.
        """
        span = self._spans.get((start, length))
        if span is not None and span.device.type != device.type:  # layers attend on the host and on a device
            if self._moved is None or self._moved[0] is not span:
                self._moved = span, span.on(device)
            return self._moved[1]
        if span is not None:
            return span
        if start != self.columns:
            raise CacheMismatchError(
                f"a layer has seen {start} tokens where the cache has seen {self.columns}: was a forward pass "
                "interrupted, or the cache used by two models? Call reset() and run the prompt again"
            )
        if self.n_seq == 0:
            self.marks.begin(n_seq)
            self.seen, self.closed = np.zeros(n_seq, dtype=np.int64), np.zeros(n_seq, dtype=np.int64)
            self.origin = np.arange(n_seq)
        if self.n_seq != n_seq:
            raise CacheMismatchError(
                f"a batch of {n_seq} sequences met a cache of {self.n_seq}; call reset() before another prompt"
            )
        span = self._open(start, length, mask, device)
        if self.tokens is not None:
            self.tokens.take(start, span.grid(), int(span.after.max()))
        if len(self._spans) >= MAX_PARTS:
            self._spans.pop(next(iter(self._spans)))
        self._spans[start, length] = span
        self.seen = span.after
        self.columns = start + length
        return span

    def span_after(self, columns: int) -> npt.NDArray[np.int64]:
        """Return the real tokens seen in the first `columns` columns, (S,).

        The boundary is inside the running pass.
        """
        return next(s.after for s in reversed(self._spans.values()) if s.start + s.length == columns)

    def _open(self, start: int, length: int, mask: Tensor | None, device: torch.device) -> ForwardSpan:
        valid = None if mask is None else mask[:, -length:].bool().cpu().numpy()
        if valid is not None and valid.all():
            valid = None
        added = length if valid is None else valid.sum(1)
        after = self.seen + added
        if mask is not None and mask.shape[1] == start + length > length:
            _check_past(mask.sum(1).cpu().numpy(), after)
        if valid is not None:
            self._padded.append((start, valid))
        q_pos = None
        if length == 1:
            positions = self.seen if valid is None else np.where(valid[:, 0], self.seen, -1)
            q_pos = on_device(positions.astype(np.int32), device)
        return ForwardSpan(start, length, self.seen, after, valid, device, q_pos, bool((self.seen > 0).all()))

    def tokens_in_last(self, columns: int) -> npt.NDArray[np.int64]:
        """Return the number of real tokens among the newest `columns`, (S,)."""
        tokens = np.full(self.n_seq, columns, dtype=np.int64)
        for start, valid in self._padded:
            tokens -= (~valid[:, max(self.columns - columns - start, 0) :]).sum(1)
        return tokens

    def mask(self) -> Tensor:
        """Return which columns so far are tokens (True) and which are pads, (S, columns) bool."""
        mask = torch.ones(self.n_seq, self.columns, dtype=torch.bool)
        for start, valid in self._padded:
            mask[:, start : start + valid.shape[1]] = torch.from_numpy(valid)
        return mask

    def rewind(self, columns: int, seen: npt.NDArray[np.int64]) -> None:
        """Return to an earlier state."""
        self.columns, self.seen = columns, seen.copy()
        self._padded = [(start, valid[:, : columns - start]) for start, valid in self._padded if start < columns]
        self._spans.clear()

    def select(self, sequences: list[int]) -> None:
        """Follow a selection or re-ordering of sequences."""
        self.seen, self.origin = self.seen[sequences], self.origin[sequences]
        self.closed = self.closed[sequences]
        self.marks.select(sequences)
        self._padded = [(start, valid[sequences]) for start, valid in self._padded]
        if self.tokens is not None:
            self.tokens.select(sequences)
        self._spans.clear()

    def begin_with(self, columns: int) -> None:
        """Begin with one sequence, `columns` tokens of which were seen before."""
        self.marks.begin(1)
        self.seen, self.origin = np.array([columns]), np.zeros(1, dtype=np.int64)
        self.closed = np.zeros(1, dtype=np.int64)
        self.columns = columns

    def close(self, sequence: int, seen: int) -> None:
        """Set the positions of a sequence to `seen` after gaps closed, between two passes."""
        self.seen, self.closed = self.seen.copy(), self.closed.copy()
        self.closed[sequence] += self.seen[sequence] - seen
        self.seen[sequence] = seen
        self._spans.clear()

    def become(self, other: PositionTracker) -> None:
        """Take the position of `other`, between two passes."""
        self.rewind(0, other.seen)
        self.columns, self.origin, self._padded = other.columns, other.origin.copy(), list(other._padded)
        self.closed = other.closed.copy()
        self.marks = other.marks.copy(range(other.n_seq))
        if other.tokens is not None:
            self.tokens = other.tokens.copy(list(range(other.n_seq)))

    def copy(self, sequences: list[int]) -> PositionTracker:
        """Return a tracker of some sequences alone, without the pads of their passes."""
        other = PositionTracker()
        other.seen, other.origin = self.seen[sequences], self.origin[sequences]
        other.closed = self.closed[sequences]
        other.marks = self.marks.copy(sequences)
        if self.tokens is not None:
            other.tokens = self.tokens.copy(sequences)
        return other

    def join(self, other: PositionTracker) -> None:
        """Take the sequences of `other`, after these; pads of either are no longer known."""
        self.marks.join(other.marks, self.n_seq)
        self.seen, self.origin = np.concatenate([self.seen, other.seen]), np.concatenate([self.origin, other.origin])
        self.closed = np.concatenate([self.closed, other.closed])
        if self.tokens is not None:
            assert other.tokens is not None, "batches that are joined keep the same things"
            self.tokens.join(other.tokens)
        self._padded = []
        self._spans.clear()

    def adopt(self, ids: Tensor) -> None:
        """Take the position after one text of these ids (1, n), as if it had been read."""
        self.begin_pass(ids)
        self.span(0, ids.shape[1], 1, None, ids.device)

    def reset(self) -> None:
        """Forget everything."""
        self.rewind(0, np.zeros(0, dtype=np.int64))
        self.closed = self.seen.copy()
        self.marks.reset()
        if self.tokens is not None:
            self.tokens.reset()


def _check_past(shown: npt.NDArray[np.int64], seen: npt.NDArray[np.int64]) -> None:
    """Compare the tokens that a mask shows with those that were read, both (S,)."""
    for sequence in np.flatnonzero(shown != seen)[:1]:
        raise CacheMismatchError(
            f"the attention mask shows {shown[sequence]} tokens of sequence {sequence} where the cache has taken in "
            f"{seen[sequence]}: pass the mask of the earlier passes, extended; what is stored cannot be hidden later"
        )
