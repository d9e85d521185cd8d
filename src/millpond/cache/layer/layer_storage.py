"""Sequences of one layer: their page table, the operations of a batch on them, and closed gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from millpond.cache.entries import quantize, read_write
from millpond.cache.entries.read_write import gather
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.state.head_rules import PromptQueries
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.prompt_sums import LayerSums
from millpond.cache.state.rerotation import CacheRelativePositions, rewrite_keys, stored
from millpond.cache.state.sequence_state import LayerSnapshot, SequenceState
from millpond.cache.types import RotaryEmbedding, by_position
from millpond.errors import CacheMismatchError, DataError
from millpond.kernels.args import PaddedEntries
from millpond.kernels.decode_rules import in_spans
from millpond.policy.policy import Policy
from millpond.prompt_marks import Span


def positions_of(table: PageTable, sequence: int) -> Tensor:
    """Return positions of codes, then of plain entries, by slot, (H, n) int64; -1 for none."""
    rows = table.rows(sequence)
    plain = table.plain_positions(rows).long()
    return plain if table.quantized is None else torch.cat([table.quantized.positions(rows).long(), plain], 1)


def least_end(at: Tensor, sinks: int) -> int:
    """Return the position after entries at `at` (H, n), -1 for none, once gaps are closed."""
    return sinks + int((at >= sinks).sum(1).max()) if at.numel() else sinks


def consecutive(at: Tensor, sinks: int, end: int) -> Tensor:
    """Return positions in place of `at` (H, n), in the same order, without gaps.

    Sinks stay, the others end at `end` - 1.
    """
    moving = at >= sinks
    order = by_position(torch.where(moving, at, -1))  # without an entry last
    ranks = torch.empty_like(order)
    ranks.scatter_(1, order, torch.arange(at.shape[1], device=at.device).expand_as(order))
    return torch.where(moving, end - moving.sum(1, keepdim=True) + ranks, at)


def renumber(
    table: PageTable,
    sequence: int,
    new: Tensor,
    rotary: RotaryEmbedding | None,
    rolling: CacheRelativePositions | None = None,
) -> None:
    """Give the entries of a sequence the positions `new`, in the order of `positions_of`.

    Args:
        table: Table of the layer.
        sequence: Sequence in the table.
        new: New positions (H, n).
        rotary: Rotary embedding of the layer's keys; None if they have no rotary position.
        rolling: Frames in which its keys are stored now.

    Raises:
        PoolFullError: no room for copies of pages that others hold; nothing was changed.
    """
    dense = stored(table, sequence)
    n_quantized = new.shape[1] - dense.positions.shape[1]
    plain = new[:, n_quantized:]
    at = dense.positions.long()
    old = at.clamp(min=0) if rolling is None else rolling.frame_positions(sequence, at)
    numbered = dense._replace(positions=plain.int())
    rewrite_keys(rotary, table, sequence, numbered, old, plain.clamp(min=0))
    if table.quantized is not None:
        assert isinstance(table.quantized, QuantizedStore), "formats by age are refused where gaps close"
        table.quantized.renumber(table.rows(sequence), new[:, :n_quantized])
    if rolling is not None:
        rolling.restart(table, sequence)


class LayerStorage:
    """Entries and state of one attention layer for a batch of sequences.

    Attributes:
        index: Index of the layer.
        columns: Columns (pads included) that this layer has seen.
        sequence_state: State of the sequences in addition to their entries.
        failed: Error of each sequence whose keys and values could not be read from a disk or written to it; zeros stand
            for these until the sequence ends.
    """

    def __init__(self, index: int, policy: Policy, tracker: PositionTracker, sequence_state: SequenceState) -> None:
        self.index = index
        self.policy = policy
        self.tracker = tracker
        self.columns = 0
        self.sequence_state = sequence_state
        self.failed: dict[int, DataError] = {}
        self._table: PageTable | None = None

    # ------------------------------------------------------------------ contents

    @property
    def table(self) -> PageTable | None:
        """Pages and lengths; None before the first token."""
        return self._table

    @property
    def stored(self) -> np.ndarray:
        """Entries that are held, in the pool or outside of it, (n_seq, n_kv_heads)."""
        selective, entries = self.sequence_state.selective, self.in_pool
        return entries if selective is None else entries + selective.entries_outside(len(entries))[:, None]

    @property
    def in_pool(self) -> np.ndarray:
        """Entries that are held in the pool, (n_seq, n_kv_heads)."""
        return self._table.entries() if self._table is not None else np.zeros((0, 0), dtype=np.int32)

    @property
    def pending(self) -> bool:
        """Whether there are entries that no plan has seen."""
        return bool(self.sequence_state.pending) or (self._table is not None and self._table.unplanned)

    @property
    def changes_at_prompt_end(self) -> bool:
        """Whether the end of a prompt may change entries: a plan waits for it, or entries become codes."""
        return self.pending or (self._table is not None and self._table.quantized is not None)

    def read(self, sequence: int) -> PaddedEntries:
        """Return the entries of one sequence by position, one row per KV head, padded at the end."""
        table = self._require_table()
        entries = read_write.in_order(read_write.read(table, sequence))
        if (basis := table.basis) is not None:
            entries = entries._replace(keys=basis.keys_back(entries.keys), values=basis.values(entries.values))
        return entries

    def _require_table(self) -> PageTable:
        if self._table is None:
            raise CacheMismatchError(f"layer {self.index} holds nothing yet: run the model first")
        return self._table

    # ------------------------------------------------------------------ batches

    def begin_with(self, table: PageTable, columns: int, sums: LayerSums | None = None) -> None:
        """Begin with `columns` tokens of a prompt that `table` holds; its plan comes later.

        Args:
            table: Table of the tokens that were read before.
            columns: Number of these tokens.
            sums: Sums over their queries, from `sums`; None for a policy that needs none.
        """
        self._table, self.columns = table, columns
        state = self.sequence_state
        if not self.policy.keeps_all:
            state.pending[0] = columns
        if sums is None:
            return
        if sums.columns is not None:
            state.columns[0] = sums.columns
        if sums.moments is not None:
            state.queries.adopt(0, sums.moments)
        if sums.queries is not None and state.head_rules is not None:
            state.head_rules.adopt(0, sums.queries)

    def sums(self, begin: int) -> LayerSums:
        """Return the policy's sums over the queries of the only sequence, during its prompt.

        Args:
            begin: Tokens whose queries are left out, if queries are kept.
        """
        table, state = self._require_table(), self.sequence_state
        columns = None
        if self.policy.observes_all:
            n, arrays = int(table.lengths().max()), table.pool.arrays
            columns = gather(arrays, table.pages[:, : -(-n // arrays.slots)], arrays.scores)[:, :n].clone()
        asked = None if state.head_rules is None else state.head_rules.queries(0)
        if asked is not None:
            asked = PromptQueries(asked.q[:, begin:].clone(), asked.lse[:, begin:].clone(), asked.q_pos[begin:].clone())
        return LayerSums(columns, state.queries.moments(0), asked)

    def join(self, other: Self) -> None:
        """Take the sequences of `other`, a cache of the same layer and policy, and empty it.

        Pages move, none is copied. Both trackers must be joined as well.
        """
        table = other._require_table()
        if self._table is None:
            self._table = table
            self._take_over(other)
            self.sequence_state.become(other.sequence_state)
        else:
            self.sequence_state.join(other.sequence_state, self._table.n_seq)
            self._table.join(table)
        other._table = None
        other.reset()

    def copy_to(self, sequences: list[int], to: Self) -> None:
        """Let `to`, an empty cache of the same layer and policy, hold some of the sequences too.

        Pages are shared.
        """
        to._table = self._require_table().fork()
        to._table.select(sequences)
        to._take_over(self)
        to.sequence_state.become(self.sequence_state.copy(sequences))

    def select(self, sequences: list[int]) -> None:
        """Keep the given sequences, in this order (beams, batch selection, repetition)."""
        if self._table is not None:
            self._table.select(sequences)
            self.sequence_state.become(self.sequence_state.copy(sequences))

    # ------------------------------------------------------------------ positions

    def text_positions(self, sequence: int, at: Tensor) -> Tensor:
        """Return the positions in the text of entries at `at` (H, n), -1 for none.

        The result is (H, n) int64; it differs from `at` once gaps have closed.
        """
        at = at.long()
        closed = int(self.tracker.closed[sequence])
        if not closed:
            return at
        origins = self.sequence_state.origins[sequence].to(at.device).long()
        n = origins.shape[1]
        older = origins.gather(1, at.clamp(min=0, max=n - 1)) if n else at
        return torch.where((at >= 0) & (at < n), older, torch.where(at >= 0, at + closed, -1))

    def least_end(self, sequence: int) -> int:
        """Return the position after the entries of a sequence once all gaps are closed."""
        return least_end(positions_of(self._require_table(), sequence), self.policy.protect.sinks)

    def close_gaps(self, sequence: int, end: int, rotary: RotaryEmbedding | None) -> None:
        """Move the entries of a sequence to consecutive positions that end before `end`.

        Keys are rotated to them. Sinks stay at their positions. The tracker follows when all layers have moved.

        Args:
            sequence: Sequence in the table.
            end: Position after the last entry.
            rotary: Rotary embedding of the layer's keys; None if they have no rotary position.

        Raises:
            PoolFullError: no room for copies of pages that others hold; nothing was changed.
        """
        table = self._require_table()
        at = positions_of(table, sequence)
        new = consecutive(at, self.policy.protect.sinks, end)
        origins = torch.full((len(at), end), -1, dtype=torch.int32, device=at.device)
        here = at >= 0
        head = torch.arange(len(at), device=at.device)[:, None].expand_as(at)
        origins[head[here], new[here]] = self.text_positions(sequence, at)[here].int()
        renumber(table, sequence, new, rotary, self.sequence_state.rolling)
        self.sequence_state.origins[sequence] = origins
        self.sequence_state.turns[sequence] = end

    def drop_spans(self, sequence: int, spans: Sequence[Span]) -> None:
        """Evict the entries of a sequence in spans of its text from every head.

        The tracker follows when all layers have dropped them.

        Raises:
            PoolFullError: no room for copies of pages that others hold; nothing was changed.
        """
        table = self._require_table()
        at = positions_of(table, sequence)
        gone = in_spans(at, torch.tensor(spans, dtype=at.dtype, device=at.device).expand(len(at), -1, -1))
        if not bool(gone.any()):
            return
        entries = read_write.read(table, sequence)
        own = torch.tensor(spans, dtype=entries.positions.dtype, device=entries.positions.device)
        gone = in_spans(entries.positions, own.expand(len(entries.positions), -1, -1))
        read_write.drop(table, sequence, entries, gone, last=not self.pending)

    # ------------------------------------------------------------------ earlier states

    def truncate(self, columns: int, tokens: np.ndarray) -> None:
        """Cut off the newest `columns`, which hold `tokens` (n_seq,) entries of every region."""
        if self._table is not None:
            for sequence, lens in enumerate(self._table.lengths()):
                gone = tokens[sequence].astype(np.int32)
                if self._table.quantized is not None:
                    gone = gone - quantize.truncate(self._table.quantized, sequence, int(self.tracker.seen[sequence]))
                self._table.set_lengths(sequence, lens - gone)
            self.columns -= columns

    def fork(self) -> LayerSnapshot:
        """Return the present state, to `restore` later or to `release`."""
        table = self._table.fork() if self._table is not None else None
        return LayerSnapshot(table, self.columns, self.sequence_state.copy())

    def restore(self, state: LayerSnapshot) -> None:
        """Return to a forked state, which is used up."""
        if self._table is not None:
            self._table.clear()
        self._table, state.table = state.table, None
        self.columns = state.columns
        self.sequence_state.become(state.sequence_state)

    def reset(self) -> None:
        """Free every page and forget every token."""
        if self._table is not None:
            self._table.clear()
        self._table, self.columns = None, 0
        self.failed = {}
        self.sequence_state.become(self.sequence_state.copy([]))

    def _take_over(self, other: Self) -> None:
        """Continue with the table of `other`, of the same layer and policy."""
