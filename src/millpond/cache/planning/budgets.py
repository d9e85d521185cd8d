"""Budgets of the sequences of one layer: what a plan and the steps after it may keep, and what stays in any case."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.positions import PositionTracker
from millpond.policy.eviction_plan import Counts
from millpond.policy.policy import Policy


class SequenceBudgets:
    """Budgets of one layer's sequences.

    Args:
        policy: Policy of the layer.
        entries: Budget in entries per KV head, see `LayerCache`.
        tracker: Positions of the sequences.
        attention: Attention of the layer.
    """

    def __init__(
        self,
        policy: Policy,
        entries: Callable[[PageTable, int, int], int],
        tracker: PositionTracker,
        attention: PagedAttention,
    ) -> None:
        self._policy, self._entries = policy, entries
        self._tracker, self._attention = tracker, attention

    def of(self, table: PageTable, sequence: int, seen: int) -> int:
        """Return the entries per KV head that a sequence of `seen` tokens may keep."""
        budget, window = self._entries(table, sequence, seen), self._attention.shape.window
        return min(budget, window) if window else budget

    def limit(self, table: PageTable, sequence: int, budget: int, capacities: Counts | None = None) -> None:
        """Limit a sequence to `budget` entries per KV head from now on, or to `capacities` (H,)."""
        numbers = np.full(table.n_kv_heads, budget) if capacities is None else capacities
        if self._attention.shape.window:
            numbers = np.minimum(numbers, self._attention.shape.window)
        n_kept = self.n_kept(sequence)
        free = np.maximum(numbers - n_kept, 0) if n_kept else numbers
        newest = self._policy.newest(self._attention.index, free, max(budget - n_kept, 0))
        table.set_budget(sequence, numbers.astype(np.int32), newest.astype(np.int32))

    def shrink_upper_tier(self, table: PageTable, positions: np.ndarray) -> None:
        """Lower the budgets of sequences at positions (S,) whose lower tier is about to grow.

        Both tiers together stay inside a budget in bytes.

        Raises:
            BudgetError: see `LayerBudgets.entries`.
        """
        budgets = table.budgets()
        due = (positions >= 0) & (table.budgeted() - budgets >= self.together(table)).any(1)
        for sequence in np.flatnonzero(due).tolist():
            old = budgets[sequence].astype(np.int64)
            budget = self.of(table, sequence, int(positions[sequence]) + 1)
            less = int(old.sum()) // len(old) - budget
            if less > 0:
                least = max(self._policy.protect.minimum(), 1)
                self.limit(table, sequence, budget, (old - less).clip(min=least))

    def n_kept(self, sequence: int) -> int:
        """Return the positions of kept spans, without sinks.

        Positions that no query of a sliding window will see are left out.
        """
        window, first = self._attention.shape.window, self._policy.protect.sinks
        if window and sequence < self._tracker.n_seq:
            first = max(first, int(self._tracker.seen[sequence]) - window + 1)
        return self._tracker.marks.kept.count(sequence, first)

    def leave_no_choice(self, table: PageTable, sequence: int, seen: int) -> bool:
        """Whether all is kept, or the budget holds all that a sliding window shows."""
        window, flags = self._attention.shape.window, self._policy.needs.prompt_flags
        if flags is not None and flags.act_within(window):  # what a prompt's queries do not see leaves in a window too
            return False
        return self._policy.keeps_all or (bool(window) and self._entries(table, sequence, seen) >= window)

    def least(self, table: PageTable, positions: np.ndarray, device: torch.device) -> Tensor | None:
        """Return the entries of spans that a decoding step at positions (S,) keeps.

        See `FairShares.least`.
        """
        fair, window = self._tracker.marks.shares, self._attention.shape.window
        if not fair:
            return None
        capacities, recent = table.budgets().astype(np.int64), table.newest_protected().astype(np.int64)
        budgets = capacities.sum(1) // table.n_kv_heads
        # heads of which each has a protection of its own: the least that one of them leaves
        free = (capacities - recent).min(1) if self._policy.makes_room else budgets - recent.min(1)
        sinks = self._policy.protect.sinks
        aside = self._tracker.marks.kept.counts(np.maximum(self._tracker.seen - window + 1, sinks) if window else sinks)
        return fair.least(positions + 1, budgets, free - sinks - aside, window, device)

    def in_kept_spans(self, sequence: int, positions: Tensor) -> Tensor | None:
        """Return the entries that stay in any plan, (H, N) bool; None if there are none.

        positions: (H, N), of the entries.
        """
        if not self.n_kept(sequence):
            return None
        return self._tracker.marks.kept.mask(sequence, positions, self._policy.protect.sinks)

    def together(self, table: PageTable) -> int:
        """Return how many entries beyond the budget a plan while decoding waits for.

        For policies that demote it is a page of them.
        """
        quantized = table.quantized
        return self._policy.plan_every if quantized is None or not quantized.codec.tiered else quantized.slots
