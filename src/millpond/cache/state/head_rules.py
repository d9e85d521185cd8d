"""State of a layer whose KV heads have rules of their own (`HeadRules`, FastGen).

The prompt's queries are kept until the heads' rules are chosen. While decoding the kernel stores every new token; then
each head releases what its rule does not keep, the new token among it, and pages follow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond.cache.entries.compaction import SlotView
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.span_marks import KeptSpans
from millpond.cache.state.token_ids import TokenIds
from millpond.cache.types import PerSequence
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, HeadRuleArgs, WindowSignalArgs
from millpond.kernels.decode_rules import UNBOUNDED, Reduce
from millpond.kernels.transfers import on_device
from millpond.policy.head_rules import NestedPlan
from millpond.policy.needs import HeadRule, HeadRules, Heads


class PromptQueries(NamedTuple):
    """Queries since the last plan of a sequence."""

    q: Tensor  #: (Hq, Q, key_dim)
    lse: Tensor  #: (Hq, Q) float32, the log of each softmax's denominator
    q_pos: Tensor  #: (Q,) int32


class HeadLimits(NamedTuple):
    """Numbers that are constant between steps, until a table has other budgets or rules."""

    capacities: Tensor  #: those of the table, by which a change is seen
    kinds: Tensor
    limited: np.ndarray  #: (S,) whether a head of the sequence lets entries go
    bounded: bool  #: whether there is a limit of the entries of any sequence
    max_entries: Tensor  #: (S,) int64, entries that all its heads may hold together
    all_sequences: Tensor | None  #: (S,) int64, the numbers of all sequences, if all are limited


class HeadRuleState:
    """Queries of one layer's sequences, and the rules of their heads at each step.

    Args:
        rules: Rules of the policy.
        queries: Queries of the sequences since their last plan; None for none.
    """

    def __init__(self, rules: HeadRules, queries: PerSequence[PromptQueries] | None = None) -> None:
        self._rules = rules
        self._queries: PerSequence[PromptQueries] = PerSequence() if queries is None else queries
        self._limits: HeadLimits | None = None

    # ------------------------------------------------------------------ the prompt

    def remember(self, sequence: int, q: Tensor, lse: Tensor, q_pos: Tensor) -> None:
        """Append the queries of one pass to earlier ones if plans use them, see `PromptQueries`."""
        if self._rules.threshold == 1:
            return
        old = self._queries.get(sequence)
        if old is not None:
            q, lse, q_pos = torch.cat([old.q, q], 1), torch.cat([old.lse, lse], 1), torch.cat([old.q_pos, q_pos])
        self._queries[sequence] = PromptQueries(q, lse, q_pos)

    def queries(self, sequence: int) -> PromptQueries | None:
        """Return the queries of a sequence since its last plan; None if none are kept."""
        return self._queries.get(sequence)

    def adopt(self, sequence: int, queries: PromptQueries) -> None:
        """Remember the queries of a sequence that `queries` of another state returned."""
        self._queries[sequence] = queries

    def received(
        self,
        sequence: int,
        keys: Tensor,
        positions: Tensor,
        shape: AttentionShape,
        n_kv_heads: int,
        begin: int,
        end: int,
    ) -> Tensor:
        """Return the attention that entries received, see `View.received`.

        Args:
            sequence: Sequence in the batch.
            keys: (H, N, key_dim), H a multiple of n_kv_heads (or the same).
            positions: (H, N) int32, -1 for none.
            shape: Scale, soft cap and window of the layer.
            n_kv_heads: KV heads of the layer.
            begin: Queries at least this many positions after an entry count.
            end: Queries less than this many positions after an entry count; 0 for all.

        Returns:
            (n_kv_heads, group, N) float32.
        """
        q, lse, q_pos = self._queries[sequence]
        max_queries = self._rules.queries
        if max_queries and len(q_pos) > max_queries:
            sampled = (
                torch.linspace(0, len(q_pos) - 1, max_queries, dtype=torch.float64, device=q.device).round().long()
            )
            q, lse, q_pos = q[:, sampled], lse[:, sampled], q_pos[sampled]
        members, n = len(q) // len(keys), positions.shape[1]
        window = min((w for w in (shape.window, end) if w), default=0)
        if window and window <= begin:
            return q.new_zeros(n_kv_heads, len(q) // n_kv_heads, n, dtype=torch.float32)
        visible = AttentionShape(shape.scale, shape.softcap, window and window - begin)
        entries = keys, q_pos - begin, positions
        sums = [  # the denominators are known, so a query seen from further back hides what is nearer, and no more
            ops.window_signal(WindowSignalArgs(q[m::members], *entries, visible, Reduce.SUM, lse=lse[m::members]))
            for m in range(members)
        ]
        return torch.stack(sums, 1).view(n_kv_heads, -1, n)

    def apply_plan(self, table: PageTable, sequence: int, plan: NestedPlan | None) -> None:
        """Let the heads of a sequence continue as planned; None if they keep everything."""
        self._queries.pop(sequence, None)
        if plan is None:
            table.set_head_rules(sequence, int(HeadRule.FULL), 0)
        else:
            table.set_head_rules(sequence, plan.kinds.cpu().numpy().astype(np.int64), plan.local)

    # ------------------------------------------------------------------ decoding

    def apply(
        self, table: PageTable, tokens: TokenIds, positions: np.ndarray, window: int, kept: KeptSpans | None = None
    ) -> None:
        """Evict what no head keeps, after a step that stored the tokens at `positions` (S,).

        Args:
            table: Table of the layer.
            tokens: Ids of the tokens.
            positions: Positions of the new tokens, -1 for none.
            window: Window of the layer; 0 for none.
            kept: Spans of the sequences that stay in every head; None for none.
        """
        limits = self._limits_of(table)
        active, device = positions >= 0, table.lens.device
        if limits.all_sequences is not None and active.all():
            chosen, max_entries, seen = limits.all_sequences, limits.max_entries, positions + 1
        else:
            numbers = np.flatnonzero(active if window else active & limits.limited)
            if not len(numbers):
                return
            chosen = on_device(numbers, device)
            max_entries, seen = limits.max_entries[chosen], positions[numbers] + 1
        if kept is None or kept.tensor(device) is None:
            return self._release(table, tokens, chosen, max_entries, seen, window, None)
        keeps = [kept.count(s, self._rules.protect.sinks) > 0 for s in chosen.tolist()]
        for members, spans in ((~np.array(keeps), None), (np.array(keeps), kept)):
            if members.any():
                rows = on_device(np.flatnonzero(members), device)
                self._release(table, tokens, chosen[rows], max_entries[rows], seen[members], window, spans)

    def _release(
        self,
        table: PageTable,
        tokens: TokenIds,
        chosen: Tensor,
        max_entries: Tensor,
        n_seen: np.ndarray,
        window: int,
        kept: KeptSpans | None,
    ) -> None:
        """Evict the entries that no head of the sequences `chosen` keeps.

        Args:
            table: Table of the layer.
            tokens: Ids of the tokens.
            chosen: Sequences, (n,).
            max_entries: Entries that all their heads together may hold, (n,) int64.
            n_seen: Their tokens so far, (n,) int64.
            window: Window of the layer; 0 for none.
            kept: Their kept spans, whose entries take no part; None for none.
        """
        n_heads, device, policy = table.n_kv_heads, table.lens.device, self._rules
        seen = on_device(n_seen, device)
        if kept is None:
            args = HeadRuleArgs(
                table.regions,
                chosen,
                tokens.all,
                policy.classes.table(device),
                table.head_rules,
                table.recent,
                seen,
                on_device(policy.quota(torch.from_numpy(n_seen)), device),
                max_entries,
                policy.protect.sinks,
                window,
                self._limits_of(table).bounded,
            )
            if table.quantized is None and ops.admit(args):
                table.admitted()
                return
        sequences = chosen.cpu().numpy()
        slots = SlotView.of(table, (sequences[:, None] * n_heads + np.arange(n_heads)).ravel())
        rows, by_head = torch.from_numpy(slots.rows).to(device), (len(sequences), n_heads, -1)
        positions = slots.positions.view(by_head)
        heads = Heads(
            slots.scores.view(by_head),
            positions,
            policy.classes_of(tokens.at(chosen, positions), positions),
            table.head_rules[rows].view(by_head[:2]),
            seen,
            table.recent[rows].view(by_head)[:, 0, 0],
            max_entries,
        )
        hidden = (
            (positions >= 0) & (seen[:, None, None] - positions >= window)
            if window
            else torch.zeros_like(positions).bool()
        )
        left_out = hidden
        if kept is not None:
            masks = [
                kept.mask(s, head_positions, policy.protect.sinks)
                for s, head_positions in zip(sequences.tolist(), positions, strict=True)
            ]
            aside = torch.stack([torch.zeros_like(hidden[0]) if mask is None else mask for mask in masks])
            left_out, heads = hidden | aside, heads._replace(most=max_entries - aside.sum((1, 2)))
        leave = hidden | policy.leaving(heads._replace(positions=positions.masked_fill(left_out, -1)))
        if bool(leave.any()):
            table.shrink(sequences, slots.evict(leave.flatten(0, 1)).reshape(by_head[:2]))

    def _limits_of(self, table: PageTable) -> HeadLimits:
        limits = self._limits
        if limits is None or limits.capacities is not table.capacities or limits.kinds is not table.head_rules:
            max_entries = table.budgets().astype(np.int64).sum(1)
            limited = (table.rules() < HeadRule.FULL).any(1) | (max_entries < UNBOUNDED)
            device = table.lens.device
            all_sequences = torch.arange(len(max_entries), device=device) if limited.all() else None
            bounded = bool((max_entries < UNBOUNDED).any())
            limits = self._limits = HeadLimits(
                table.capacities, table.head_rules, limited, bounded, on_device(max_entries, device), all_sequences
            )
        return limits

    # ------------------------------------------------------------------ the batch

    def copy(self, sequences: list[int] | None = None) -> HeadRuleState:
        """Return an independent copy of the given sequences in this order, or of all."""
        return HeadRuleState(self._rules, self._queries.copy(sequences))

    def join(self, other: HeadRuleState, n_seq: int) -> None:
        """Take the sequences of `other`, after the `n_seq` of this batch."""
        self._queries.join(other._queries, n_seq)
