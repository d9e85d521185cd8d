"""Plans of one layer: when to plan, under which budget, and how a plan or a merge changes the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.entries import read_write
from millpond.cache.layer.prompt_pages import PromptPages
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.planning.budgets import SequenceBudgets
from millpond.cache.planning.prompt_selection import ScoreCheck, Wanted, only_selects, select
from millpond.cache.planning.step_merger import StepMerger
from millpond.cache.planning.views import ViewBuilder
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.reconstruction import ReconstructionProbe
from millpond.cache.state.sequence_state import SequenceState
from millpond.cache.types import Entries, PromptChunk, by_position
from millpond.errors import BudgetError, OptionError
from millpond.kernels.decode_rules import UNBOUNDED
from millpond.policy.eviction_plan import Counts, EvictionPlan, with_rest
from millpond.policy.head_rules import NestedPlan
from millpond.policy.merging import Merged
from millpond.policy.policy import REDUCE, Policy
from millpond.policy.protect import kept_beyond_budget
from millpond.policy.scores.attention import is_by_region
from millpond.policy.step_merge import slot_plan
from millpond.policy.view import View, columns_of

T = TypeVar("T")


class Planner:
    """Plans of one layer's sequences: their inputs, and their state for the next plan.

    Args:
        policy: Policy of the layer.
        entries: Budget in entries per KV head, see `LayerCache`.
        tracker: Positions of the sequences.
        attention: Attention of the layer.
        sequence_state: State of the sequences.

    Attributes:
        views: Views that the policy receives.
        budgets: Budgets of the sequences.
    """

    def __init__(
        self,
        policy: Policy,
        entries: Callable[[PageTable, int, int], int],
        tracker: PositionTracker,
        attention: PagedAttention,
        sequence_state: SequenceState,
    ) -> None:
        self.views = ViewBuilder(policy, tracker, attention, sequence_state)
        self.budgets = SequenceBudgets(policy, entries, tracker, attention)
        self._policy = policy
        self._attention = attention
        self._sequence_state = sequence_state
        self._tracker = tracker
        slots = slot_plan(policy, attention.index)
        self._only_selects = only_selects(policy)
        self._check: ScoreCheck | None = None
        self._merger = None if slots is None else StepMerger(slots, REDUCE[policy.reduce], attention, sequence_state)

    # ------------------------------------------------------------------ what comes before a plan

    def add_chunk(
        self,
        table: PageTable,
        chunk: PromptChunk,
        lse: Tensor,
        sums: Tensor | None,
        *,
        defer: bool = False,
        until: int = 0,
    ) -> None:
        """Plan with the tokens of one pass, or hold all and `defer` the plan to `run_deferred`.

        Args:
            table: Table of the layer.
            chunk: Tokens of the pass, and the entries that they attend to.
            lse: Log-sum-exp (Hq, Q) float32 of their attention.
            sums: Column sums (H, N) float32 of their attention, if made.
            defer: Whether the plan is deferred.
            until: Tokens of the text that are known to follow, these included, if a chunk of it ends: entries beyond
                their budget are evicted, and the plan of the whole is still to come. 0 if no chunk ends.
        """
        sequence, q, q_pos, seen, entries, _ = chunk
        self._sequence_state.queries.remember(sequence, q, q_pos, (seen - len(q_pos), seen), self._attention.rotary)
        if self._sequence_state.head_rules is not None:
            self._sequence_state.head_rules.remember(sequence, q, lse, q_pos)
        if sums is not None:
            entries = entries._replace(scores=entries.scores * self._policy.decay ** len(q_pos) + sums)
        if sequence not in self._sequence_state.pending:
            self._sequence_state.turns[sequence] = seen - len(q_pos)
        if until:
            self._sequence_state.pending[sequence] = seen
            self.plan(table, sequence, entries, seen, self.budgets.of(table, sequence, until), between=True)
        elif defer:
            self._sequence_state.pending[sequence] = seen
            if sums is None:  # nothing but the new entries changes
                keys, values, scores = (t[:, -len(q_pos) :] for t in (entries.keys, entries.values, entries.scores))
                read_write.append(table, sequence, keys, values, q_pos, scores)
            else:
                read_write.replace(table, sequence, entries, entries.positions >= 0, last=False)
        else:
            self._sequence_state.pending.pop(
                sequence, None
            )  # what waited, of a prompt that was broken off, is found too
            self._prompt_ends(sequence, seen)
            self.plan(table, sequence, entries, seen)

    def add_partial(self, table: PageTable, q: Tensor, q_pos: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Hold all tokens of a pass of the only sequence, of which some have queries.

        They wait for `run_deferred`.

        Args:
            table: Table of the layer.
            q: Queries (Hq, R, key_dim).
            q_pos: Positions (R,) of the queries.
            k: Keys (Hkv, Q, key_dim).
            v: Values (Hkv, Q, value_dim).
            positions: Positions (Q,) of keys and values.
        """
        if len(q_pos) and (self._policy.window or self._policy.sums_queries):
            span = int(q_pos[0]), int(q_pos[-1]) + 1
            self._sequence_state.queries.remember(0, q, q_pos, span, self._attention.rotary)
        if not self._policy.keeps_all or self._attention.shape.window:
            if 0 not in self._sequence_state.pending:
                self._sequence_state.turns[0] = int(positions[0])
            self._sequence_state.pending[0] = int(positions[-1]) + 1
        read_write.append(table, 0, k, v, positions)

    def run_deferred(
        self, table: PageTable, pages: PromptPages, reconstruction: ReconstructionProbe | None = None
    ) -> PageTable:
        """Run plans that wait for the end of the prompt; scores rise to those of `reconstruction`.

        Returns:
            The table that holds it from now on.
        """
        pending = self._sequence_state.pending
        if pending and reconstruction is None and self._policy.needs.prompt_repeat is not None:
            raise OptionError(
                "drafts follow a prompt before it could be repeated, as in assisted generation; use another method "
                "with it"
            )

        def plan(into: PageTable, sequence: int) -> None:
            seen = pending.get(sequence)
            entries = read_write.read(table, sequence, self.held_if_complete(sequence, seen or 0))
            if seen is None:
                return read_write.replace(into, sequence, entries, entries.positions >= 0)
            if reconstruction is not None:
                entries = _raised(entries, sequence, reconstruction)
            self._prompt_ends(sequence, seen)
            self.plan(into, sequence, entries, seen)

        with self._repeated(reconstruction):
            into = pages.end(table, sorted(pending), plan)
        pending.clear()
        return into

    @contextmanager
    def _repeated(self, reconstruction: ReconstructionProbe | None) -> Iterator[None]:
        """Let views show what a repetition of the prompt has recorded."""
        before, self.views.repetition = self.views.repetition, reconstruction  # a plan measures its own layer too
        try:
            yield
        finally:
            self.views.repetition = before

    def _prompt_ends(self, sequence: int, seen: int) -> None:
        """Remember where the newest prompt of a sequence lies, if the policy protects prompts."""
        if self._policy.protect.prompt:
            span = self._sequence_state.turns.get(sequence, 0), seen
            before = self._sequence_state.prompts.get(sequence, ())
            if before[-1:] != (span,):  # a plan that found no room is made again
                self._sequence_state.prompts[sequence] = (*before, span)

    def stepped(self, table: PageTable, q: Tensor, q_pos: Tensor, positions: np.ndarray) -> None:
        """After a step, evict or merge what the decode kernel could not, down to the budget.

        `plan_every` entries may gather beyond it first. q: (S, Hq, key_dim) at q_pos (S,); `positions` (S,): the same
        on the host, -1 for a sequence without a token.
        """
        active = positions >= 0
        merger = None if self._attention.shape.window else self._merger  # it knows nothing of what a window hides
        if merger.looks_back if merger is not None else self._policy.window > 0 or self._policy.sums_queries:
            for s in np.flatnonzero(active).tolist():
                span = int(positions[s]), int(positions[s]) + 1
                self._sequence_state.queries.remember(s, q[s, :, None], q_pos[s : s + 1], span, self._attention.rotary)
        capacities = table.budgets().astype(np.int64)
        due = active & (table.budgeted() - capacities >= self.budgets.together(table)).any(1)
        if merger is not None:
            marks = self._tracker.marks
            apart = due & (marks.kept.marked(table.n_seq) | marks.shares.marked(table.n_seq))
            if (due & ~apart).any():
                merger.merge(table, q_pos, due & ~apart)
            due = apart  # the kernel knows nothing of spans
        for s in np.flatnonzero(due).tolist():
            budget = self._sequence_state.ceilings.get(s, int(capacities[s].sum()) // table.n_kv_heads)
            self.plan(table, s, read_write.read(table, s), int(positions[s]) + 1, budget)

    # ------------------------------------------------------------------ plan and apply

    def plan(
        self,
        table: PageTable,
        sequence: int,
        entries: Entries,
        seen: int,
        budget: int | None = None,
        *,
        between: bool = False,
    ) -> None:
        """Evict what the plan of one sequence does not keep; `budget` None: that of `seen` tokens.

        Args:
            table: Table of the layer.
            sequence: Sequence in the table.
            entries: Stored and new entries of the sequence.
            seen: Tokens of the sequence that were read.
            budget: Entries per KV head; None for the budget of `seen` tokens.
            between: Whether more of the prompt follows, so that nothing is quantized yet.
        """
        if entries.complete and self._selects(table, sequence, seen):
            budget = self.budgets.of(table, sequence, seen) if budget is None else budget
            return self._select(table, sequence, entries, seen, budget, between)
        alive = entries.positions >= 0
        window = self._attention.shape.window
        if window:  # what no later query can see
            alive &= seen - entries.positions < window
        plan: EvictionPlan | None = None
        known = budget is not None and self._policy.needs_all_layers  # only the first plan asks what the prompt decided
        is_settled = not known and self.budgets.leave_no_choice(table, sequence, seen)
        once, bounded = self._policy.once, self._policy.bounded
        most = self.budgets.of(table, sequence, seen) if once and bounded else UNBOUNDED
        visible = min(seen, window) if window else seen
        visible -= self._tracker.marks.dropped.count(sequence, seen - visible)
        counts = alive.sum(1)
        done = once and bool((counts < visible).any()) and int(counts.sum()) <= most * len(counts)
        if not (done or is_settled):
            budget = self.budgets.of(table, sequence, seen) if budget is None else budget
            plan = self._choose(table, sequence, entries, alive, seen, budget, between)
            if self._policy.plans_below_budget:
                self._sequence_state.ceilings[sequence] = budget
            self.budgets.limit(table, sequence, budget, None if plan is None else plan.caps)
        else:
            read_write.replace(table, sequence, entries, alive, last=not between)
            self.budgets.limit(
                table, sequence, most, with_rest(counts.cpu().numpy(), most) if most < UNBOUNDED else None
            )
        if self._sequence_state.head_rules is not None:
            assert plan is None or isinstance(plan, NestedPlan)
            self._sequence_state.head_rules.apply_plan(table, sequence, plan)

    def held_if_complete(self, sequence: int, seen: int) -> int | None:
        """Return how many entries a head holds of a sequence that has lost none of `seen` tokens.

        None if that cannot be told: gaps that were closed give entries other positions, in any order.
        """
        closed = self._tracker.closed
        return None if sequence < len(closed) and closed[sequence] else seen

    def _selects(self, table: PageTable, sequence: int, seen: int) -> bool:
        """Whether a plan of a sequence that has lost no token is a choice by scores alone."""
        if not self._only_selects or self._attention.shape.window:
            return False
        if (
            self._tracker.marks.shares
            or self.budgets.n_kept(sequence)
            or self.budgets.leave_no_choice(table, sequence, seen)
        ):
            return False
        return table.quantized is None or not table.quantized.codec.tiered

    def _select(self, table: PageTable, sequence: int, entries: Entries, seen: int, budget: int, between: bool) -> None:
        """Let the table hold what `select` chooses of all tokens of a sequence, as `plan` does."""
        entries = self.views.signal(sequence, entries)
        view = self.views.of(table, sequence, entries, entries.positions, None, seen)
        selection = select(self._policy, view, [Wanted(self._attention.index, budget, between)])
        self._expect(selection.check)
        (counts,), (capacities,) = selection.counts, selection.capacities
        read_write.keep_columns(table, sequence, entries, selection.columns, counts, last=not between)
        self.budgets.limit(table, sequence, budget, capacities)

    def wanted(self, table: PageTable) -> Wanted | None:
        """Return what the plan that waits for the end of the only prompt asks.

        None if it cannot be made with those of other layers: it is made alone, by `run_deferred`.
        """
        if table.n_seq > 1 or table.is_offloaded or type(self._attention) is not PagedAttention:
            return None
        codes, shape = table.quantized, self._attention.shape
        if codes is not None and (not isinstance(codes, QuantizedStore) or codes.lens.any() or not codes.is_plain):
            return None
        seen = int(self._tracker.seen[0])
        complete = self.held_if_complete(0, seen) is not None and bool((table.lengths() == seen).all())
        if not complete or shape.window or self._sequence_state.selective is not None:
            return None
        if self._policy.keeps_all:
            return None if codes is None else Wanted(self._attention.index, UNBOUNDED)
        if self._sequence_state.pending.get(0) != seen or shape.sink_logits is not None:
            return None
        if self._policy.needs.prompt_repeat is not None or not is_by_region(self._policy.score):
            return None
        return Wanted(self._attention.index, self.budgets.of(table, 0, seen)) if self._selects(table, 0, seen) else None

    def joint_view(self, n_regions: int, signal: Tensor | None, device: torch.device) -> View:
        """Return the view of all tokens of the only prompt, for plans of several layers.

        Args:
            n_regions: KV heads of all layers.
            signal: (n_regions, N) the signal of their scores.
            device: Device of the layers.
        """
        seen = self._sequence_state.pending[0]
        self._prompt_ends(0, seen)
        return self.views.of_all(0, n_regions, signal, seen, device)

    def end_joint_plan(self, table: PageTable, wanted: Wanted, capacities: Counts | None) -> None:
        """Set the budget of the only sequence after the plan that `wanted` asked."""
        if not self._policy.keeps_all:
            self._prompt_ends(0, self._sequence_state.pending[0])
            self.budgets.limit(table, 0, wanted.budget, capacities)
            self._sequence_state.pending.clear()

    def _expect(self, check: ScoreCheck) -> None:
        """Refuse NaN in the scores of a plan once that has reached the host.

        That is in the next plan or step at the latest.
        """
        self.settle()
        self._check = check
        if check.is_ready:
            self.settle()

    @property
    def is_settled(self) -> bool:
        """Whether no plan is left whose scores were not looked at."""
        return self._check is None

    def settle(self) -> None:
        """Look at the scores of the last plan.

        Raises:
            NumericsError: they are NaN.
        """
        check, self._check = self._check, None
        if check is not None:
            check.settle()

    def _choose(
        self, table: PageTable, sequence: int, entries: Entries, alive: Tensor, seen: int, budget: int, between: bool
    ) -> EvictionPlan | None:
        """Ask the policy about the candidates that are `alive` (H, N), and hold what it keeps.

        None if it was not needed.

        Raises:
            BudgetError: kept spans leave less of the budget than the policy protects.
        """
        entries = self.views.signal(sequence, entries)
        aside, n_kept = self._kept_aside(sequence, entries.positions, alive, seen, budget)
        if aside is not None:
            alive = alive & ~aside
            if not bool(alive.any()):
                read_write.replace(table, sequence, entries, aside, last=not between)
                return None
        if table.quantized is not None and table.quantized.codec.tiered:
            alive = alive.clone()
            above = sum(part.width(sequence) for part in table.packed_parts[:-1])
            alive[:, above : entries.n_quantized] = False  # what was demoted once is chosen no more
        positions = torch.where(alive, entries.positions, -1)
        order = by_position(positions)
        view = self.views.of(table, sequence, entries, positions, order, seen)
        if self._tracker.marks.shares:
            window = self._attention.shape.window
            visible = min(seen, window) if window else seen
            fair = self._tracker.marks.shares.view(sequence, seen, visible, budget, aside, entries.positions)
            view = replace(view, fair=fair)
        plan = self._policy.plan(view, budget - n_kept, between=between)
        if plan.standing is not None:
            entries = entries._replace(scores=torch.zeros_like(entries.scores).scatter_(1, order, plan.standing))
        if plan.merged is None:
            keep = torch.zeros_like(alive).scatter_(1, order, plan.keep)
            keep = keep if aside is None else keep | aside
            read_write.replace(table, sequence, entries, keep, last=not between)
        else:
            self._hold_merged(table, sequence, plan.merged, view.positions, plan.keep, entries, aside)
        return replace(plan, caps=np.minimum(plan.caps + n_kept, UNBOUNDED)) if n_kept else plan

    def _kept_aside(
        self, sequence: int, positions: Tensor, alive: Tensor, seen: int, budget: int
    ) -> tuple[Tensor | None, int]:
        """Return candidates that stay in any plan, (H, N) bool, and their share of the budget.

        The policy plans without them. The share counts the entries of the `budget` of each head that are for such,
        read or not. None if the sequence keeps none.

        Raises:
            BudgetError: they leave less of the budget than the policy protects.
        """
        n_kept, aside = self.budgets.n_kept(sequence), self.budgets.in_kept_spans(sequence, positions)
        if aside is None:
            return None, 0
        least = self._policy.protect.minimum()
        if budget - n_kept < least:
            raise BudgetError(kept_beyond_budget(n_kept, least, budget))
        return aside & alive, n_kept if budget < UNBOUNDED else 0

    def _hold_merged(
        self,
        table: PageTable,
        sequence: int,
        merged: Merged,
        positions: Tensor,
        keep: Tensor,
        before: Entries,
        aside: Tensor | None,
    ) -> None:
        """Hold merged entries in fresh pages, and entries `aside` (H, N) as they were `before`."""
        masses = merged.log_masses if self._policy.mass_bias else None
        keys, values, basis = merged.keys, merged.values, table.basis
        if basis is not None:
            keys, values = basis.keys(keys), basis.values(values)
        entries = Entries(keys, values, positions, merged.scores, masses)
        if aside is not None:
            entries, kept = _behind(entries, before, aside)
            keep = torch.cat([keep, kept], 1)
        read_write.replace(table, sequence, entries, keep)
        if merged.memory is not None:
            self._sequence_state.memories[sequence] = merged.memory

    def measure(
        self,
        table: PageTable,
        sequence: int,
        of: Callable[[View], T],
        reconstruction: ReconstructionProbe | None = None,
    ) -> T:
        """Return `of` one sequence as a plan would see it; scores rise to its `reconstruction`."""
        entries = self.views.signal(sequence, read_write.read(table, sequence))
        if reconstruction is not None:
            entries = _raised(entries, sequence, reconstruction)
        order, seen = by_position(entries.positions), int(entries.positions.max()) + 1
        with self._repeated(reconstruction):
            return of(self.views.of(table, sequence, entries, entries.positions, order, seen))


def _raised(entries: Entries, sequence: int, reconstruction: ReconstructionProbe) -> Entries:
    """Return entries of a sequence with scores that rise to those of a reconstruction."""
    return entries._replace(scores=torch.maximum(entries.scores, reconstruction.at(sequence, entries.positions)))


def _behind(first: Entries, before: Entries, aside: Tensor) -> tuple[Entries, Tensor]:
    """Return merged entries, then those of `before` set `aside` (H, N), and their places."""
    order = by_position(torch.where(aside, before.positions, -1))[:, : int(aside.sum(1).max())]
    masses = None
    if first.log_masses is not None:
        logs = before.log_masses if before.log_masses is not None else torch.zeros_like(before.scores)
        masses = torch.cat([first.log_masses, columns_of(logs, order)], 1)
    parts = [
        torch.cat([own, columns_of(old, order).to(own.dtype)], 1)
        for own, old in zip(first[:4], before[:4], strict=True)
    ]
    return Entries(parts[0], parts[1], parts[2], parts[3], masses), aside.gather(1, order)
