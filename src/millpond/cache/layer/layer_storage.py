"""Sequences of one layer: their page table, and the operations of a batch on them."""

from __future__ import annotations

from typing import Self

import numpy as np

from millpond.cache.entries import quantize, read_write
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.sequence_state import LayerSnapshot, SequenceState
from millpond.codec.rotate import rotate
from millpond.errors import CacheMismatchError, DataError
from millpond.kernels.args import PaddedEntries
from millpond.policy.policy import Policy


class LayerStorage:
    """What one attention layer holds of a batch of sequences.

    Attributes:
        index: of the layer.
        columns: columns (pads included) that this layer has seen.
        companions: state of the sequences in addition to their entries.
        lost: sequences whose keys and values could not be read from a disk or written to it, and why; zeros stand for
            these until the sequence ends.
    """

    def __init__(self, index: int, policy: Policy, timeline: PositionTracker, companions: SequenceState) -> None:
        self.index = index
        self.policy = policy
        self.timeline = timeline
        self.columns = 0
        self.companions = companions
        self.lost: dict[int, DataError] = {}
        self._table: PageTable | None = None

    # ------------------------------------------------------------------ contents

    @property
    def table(self) -> PageTable | None:
        """Pages and lengths; None before the first token."""
        return self._table

    @property
    def stored(self) -> np.ndarray:
        """(n_seq, n_kv_heads) entries held."""
        return self._table.entries() if self._table is not None else np.zeros((0, 0), dtype=np.int32)

    @property
    def pending(self) -> bool:
        """Whether there are entries that no plan has seen."""
        return bool(self.companions.pending) or (self._table is not None and self._table.unplanned)

    @property
    def settles(self) -> bool:
        """Whether the end of a prompt may change entries: a plan waits for it, or entries become codes."""
        return self.pending or (self._table is not None and self._table.sealed is not None)

    def read(self, sequence: int) -> PaddedEntries:
        """The entries of one sequence, one row per KV head, in the order of their positions, padded at the end."""
        table = self._require_table()
        found = read_write.in_order(read_write.read(table, sequence))
        if table.is_hadamard_rotated:
            found = found._replace(keys=rotate(found.keys), values=rotate(found.values))
        return found

    def _require_table(self) -> PageTable:
        if self._table is None:
            raise CacheMismatchError(f"layer {self.index} holds nothing yet: run the model first")
        return self._table

    # ------------------------------------------------------------------ batches

    def begin_with(self, table: PageTable, columns: int) -> None:
        """Begin with `columns` tokens of a prompt that were read before, which `table` holds; its plan comes later."""
        self._table, self.columns = table, columns
        if not self.policy.keeps_all:
            self.companions.pending[0] = columns

    def join(self, other: Self) -> None:
        """Take over the sequences of `other`, a cache of the same layer and policy; it holds nothing afterwards.

        Pages move, none is copied. Both timelines must be joined as well.
        """
        table = other._require_table()
        if self._table is None:
            self._table = table
            self._take_over(other)
            self.companions.become(other.companions)
        else:
            self.companions.join(other.companions, self._table.n_seq)
            self._table.join(table)
        other._table = None
        other.reset()

    def lend(self, sequences: list[int], to: Self) -> None:
        """Let `to`, an empty cache of the same layer and policy, hold some of the sequences too; pages are shared."""
        to._table = self._require_table().fork()
        to._table.select(sequences)
        to._take_over(self)
        to.companions.become(self.companions.copy(sequences))

    def select(self, sequences: list[int]) -> None:
        """Become the given sequences, in this order (beams, batch selection, repetition)."""
        if self._table is not None:
            self._table.select(sequences)
            self.companions.become(self.companions.copy(sequences))

    # ------------------------------------------------------------------ earlier states

    def truncate(self, columns: int, tokens: np.ndarray) -> None:
        """Cut off the newest `columns`, which hold `tokens` (n_seq,) entries of every region of a sequence."""
        if self._table is not None:
            for sequence, lens in enumerate(self._table.lengths()):
                gone = tokens[sequence].astype(np.int32)
                if self._table.sealed is not None:
                    gone = gone - quantize.truncate(self._table.sealed, sequence, int(self.timeline.seen[sequence]))
                self._table.set_lengths(sequence, lens - gone)
            self.columns -= columns

    def fork(self) -> LayerSnapshot:
        """The state as it is now, to `restore` later or to `release`."""
        table = self._table.fork() if self._table is not None else None
        return LayerSnapshot(table, self.columns, self.companions.copy())

    def restore(self, state: LayerSnapshot) -> None:
        """Go back to a forked state, which is used up."""
        if self._table is not None:
            self._table.clear()
        self._table, state.table = state.table, None
        self.columns = state.columns
        self.companions.become(state.companions)

    def reset(self) -> None:
        """Free every page and forget every token."""
        if self._table is not None:
            self._table.clear()
        self._table, self.columns = None, 0
        self.lost = {}
        self.companions.become(self.companions.copy([]))

    def _take_over(self, other: Self) -> None:
        """Continue with the table of `other`, of the same layer and policy."""
