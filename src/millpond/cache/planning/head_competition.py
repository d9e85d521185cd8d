"""Reallocation of a layer's budget between heads in a decoding step; their pages are resized."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from millpond.cache.entries.compaction import SlotView
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.span_marks import KeptSpans
from millpond.errors import PoolFullError
from millpond.kernels.decode_rules import INF, DecodeRule, eviction_value, in_spans
from millpond.kernels.transfers import on_device
from millpond.policy.fair_shares import best_of_spans
from millpond.policy.head_allocation import HeadAllocation, lowest_scored


@dataclass(frozen=True, slots=True)
class HeadCompetition:
    """Sequences of one layer whose heads compete in this step.

    In such a step the kernel evicts nothing. Then as many entries are evicted as were added, the lowest of all heads
    together, and the entries that a head then holds are its capacity from now on. Whether a step is one depends on the
    sequence's own position alone, so that the batch changes nothing.
    """

    table: PageTable
    heads: HeadAllocation
    sequences: np.ndarray

    @classmethod
    def of(cls, table: PageTable, heads: HeadAllocation, positions: np.ndarray) -> HeadCompetition | None:
        """Return the competing sequences for new tokens at `positions` (S,); None without any.

        A position is -1 for no token.
        """
        if not heads.every or table.n_kv_heads == 1:
            return None
        due = (positions >= 0) & ((positions + 1) % heads.every == 0)
        if not due.any():
            return None
        due &= (table.entries() == table.budgets()).all(1)
        return cls(table, heads, np.flatnonzero(due)) if due.any() else None

    def make_room(self, grows_always: bool) -> None:
        """Before the step, reserve a page for every region that may grow, or that competes.

        Raises:
            PoolFullError: the pool is full; nothing was changed.
        """
        before = self.table.budgets()
        raised = before.copy()
        raised[self.sequences] += 1
        self.table.set_budgets(raised)
        try:
            self.table.make_room(grows_always)
        except PoolFullError:
            self.table.set_budgets(before)
            raise

    def compete(self, rule: DecodeRule, q_pos: Tensor, window: int, kept: KeptSpans) -> None:
        """After the step, evict the lowest entries of all heads.

        Args:
            rule: Decode rule that orders entries.
            q_pos: Positions (S,) of the new tokens.
            window: Window of the layer; 0 for none.
            kept: Kept spans of the sequences, whose entries take no part.
        """
        table, n_heads = self.table, self.table.n_kv_heads
        rows = np.concatenate([np.arange(table.n_regions)[table.rows(s)] for s in self.sequences.tolist()])
        slots = SlotView.of(table, rows)
        positions, valid = slots.positions, slots.valid
        query = q_pos[on_device(self.sequences, q_pos.device)].repeat_interleave(n_heads)[:, None]
        value = eviction_value(rule, slots.scores, positions, query, n_heads)
        if window:
            value = value.masked_fill(query + 1 - positions >= window, -INF)
        recent = table.recent[on_device(rows, q_pos.device)][:, None]
        pinned = valid & ((positions < rule.sinks) | (query - positions < recent))
        aside = self._aside(positions, kept, rule.sinks)
        if table.least is not None:
            of_spans = table.least[on_device(self.sequences, table.least.device)]
            least = of_spans.repeat_interleave(n_heads, 0)
            whole = pinned if aside is None else pinned | (valid & aside)
            pinned = pinned | best_of_spans(value, valid, whole, positions, least)
        if aside is not None:
            pinned &= ~aside
        capacities = table.budgets()
        budget = on_device(capacities[self.sequences].sum(1) // n_heads - 1, value.device)
        budget = budget.repeat_interleave(n_heads)
        if aside is None:
            free, floor = valid & ~pinned, self.heads.floor(pinned.sum(1), budget)
        else:
            n_kept = (valid & aside).sum(1)
            free = valid & ~pinned & ~aside
            floor = n_kept + self.heads.floor(pinned.sum(1), (budget - n_kept).clamp(min=0))
        spare = (valid.sum(1) - floor).clamp(min=0)
        by_head = (len(self.sequences), n_heads, -1)
        leave = lowest_scored(
            value.view(by_head), positions.view(by_head), free.view(by_head), spare.view(by_head[:2]), n_heads
        ).flatten(0, 1)
        lengths = slots.evict(leave).reshape(by_head[:2])
        capacities[self.sequences] = (valid & ~leave).sum(1).view(by_head[:2]).cpu().numpy().astype(np.int32)
        for sequence, lens in zip(self.sequences.tolist(), lengths, strict=True):
            table.set_lengths(sequence, lens)
        table.set_budgets(capacities)

    def _aside(self, positions: Tensor, kept: KeptSpans, sinks: int) -> Tensor | None:
        """Return which positions (n, N) of the competing sequences are kept, sinks left out.

        None if none is.
        """
        spans = kept.tensor(positions.device)
        if spans is None:
            return None
        own = spans[on_device(self.sequences, spans.device)].repeat_interleave(self.table.n_kv_heads, 0)
        return in_spans(positions, own) & (positions >= sinks)
