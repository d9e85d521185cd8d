"""State of a layer whose KV heads have rules of their own (`HeadRules`, FastGen).

The prompt's queries are kept until the heads' rules are chosen. While decoding the kernel stores every new token; then
each head releases what its rule does not keep, the new token among it, and its pages follow.
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
from millpond.policy.head_rules import NestedPlan
from millpond.policy.needs import HeadRule, HeadRules, Heads


class PromptQueries(NamedTuple):
    """Queries since the last plan of a sequence."""

    q: Tensor  #: (Hq, Q, key_dim)
    lse: Tensor  #: (Hq, Q) float32, the log of each softmax's denominator
    q_pos: Tensor  #: (Q,) int32


class HeadLimits(NamedTuple):
    """Values that are constant between steps, until a table has other budgets or rules."""

    capacities: Tensor  #: those of the table, by which a change is seen
    kinds: Tensor
    limited: np.ndarray  #: (S,) whether a head of the sequence lets entries go
    most: Tensor  #: (S,) int64, entries that all its heads may hold together
    everyone: Tensor | None  #: (S,) int64, the numbers of all sequences, if all are limited


class HeadRuleState:
    """The queries of one layer's sequences, and the rules of their heads at each step."""

    def __init__(self, rules: HeadRules, asked: PerSequence[PromptQueries] | None = None) -> None:
        self._rules = rules
        self._asked: PerSequence[PromptQueries] = PerSequence() if asked is None else asked
        self._limits: HeadLimits | None = None

    # ------------------------------------------------------------------ the prompt

    def remember(self, sequence: int, q: Tensor, lse: Tensor, q_pos: Tensor) -> None:
        """Append the queries of one pass to those of earlier passes, where plans use them; see `PromptQueries`."""
        if self._rules.threshold == 1:
            return
        old = self._asked.get(sequence)
        if old is not None:
            q, lse, q_pos = torch.cat([old.q, q], 1), torch.cat([old.lse, lse], 1), torch.cat([old.q_pos, q_pos])
        self._asked[sequence] = PromptQueries(q, lse, q_pos)

    def asked(self, sequence: int) -> PromptQueries | None:
        """Return the queries of a sequence since its last plan; None: none are kept."""
        return self._asked.get(sequence)

    def adopt(self, sequence: int, queries: PromptQueries) -> None:
        """Remember of a sequence what `asked` of another state gave."""
        self._asked[sequence] = queries

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
        """Return see `View, (n_kv_heads, group, N) float32.received`.

        Args:
            keys: (H, N, key_dim), H a multiple of n_kv_heads (or the same).
            positions: (H, N) int32, -1 for none.
        """
        q, lse, q_pos = self._asked[sequence]
        most = self._rules.queries
        if most and len(q_pos) > most:
            chosen = torch.linspace(0, len(q_pos) - 1, most, dtype=torch.float64, device=q.device).round().long()
            q, lse, q_pos = q[:, chosen], lse[:, chosen], q_pos[chosen]
        members, n = len(q) // len(keys), positions.shape[1]
        window = min((w for w in (shape.window, end) if w), default=0)
        if window and window <= begin:
            return q.new_zeros(n_kv_heads, len(q) // n_kv_heads, n, dtype=torch.float32)
        near = AttentionShape(shape.scale, shape.softcap, window and window - begin)
        rest = keys, q_pos - begin, positions
        sums = [  # the denominators are known, so a query seen from further back hides what is nearer, and no more
            ops.window_signal(WindowSignalArgs(q[m::members], *rest, near, Reduce.SUM, lse=lse[m::members]))
            for m in range(members)
        ]
        return torch.stack(sums, 1).view(n_kv_heads, -1, n)

    def apply_plan(self, table: PageTable, sequence: int, plan: NestedPlan | None) -> None:
        """Let the heads of a sequence continue as planned; None: they keep everything."""
        self._asked.pop(sequence, None)
        if plan is None:
            table.set_head_rules(sequence, int(HeadRule.FULL), 0)
        else:
            table.set_head_rules(sequence, plan.kinds.cpu().numpy().astype(np.int64), plan.local)

    # ------------------------------------------------------------------ decoding

    def apply(
        self, table: PageTable, tokens: TokenIds, positions: np.ndarray, window: int, kept: KeptSpans | None = None
    ) -> None:
        """After a step that stored the tokens at `positions` (S,), -1 for none: what no head keeps leaves.

        kept: spans of the sequences, which stay in every head; None: none.
        """
        limits = self._limits_of(table)
        active, device = positions >= 0, table.lens.device
        if limits.everyone is not None and active.all():
            chosen, together, seen = limits.everyone, limits.most, torch.from_numpy(positions + 1).to(device)
        else:
            numbers = np.flatnonzero(active if window else active & limits.limited)
            if not len(numbers):
                return
            chosen = torch.from_numpy(numbers).to(device)
            together, seen = limits.most[chosen], torch.from_numpy(positions[numbers] + 1).to(device)
        if kept is None or kept.tensor(device) is None:
            return self._release(table, tokens, chosen, together, seen, window, None)
        keeps = [kept.count(s, self._rules.protect.sinks) > 0 for s in chosen.tolist()]
        for some, own in ((~np.array(keeps), None), (np.array(keeps), kept)):
            if some.any():
                rows = torch.from_numpy(np.flatnonzero(some)).to(device)
                self._release(table, tokens, chosen[rows], together[rows], seen[rows], window, own)

    def _release(
        self,
        table: PageTable,
        tokens: TokenIds,
        chosen: Tensor,
        together: Tensor,
        seen: Tensor,
        window: int,
        kept: KeptSpans | None,
    ) -> None:
        """What no head of the sequences `chosen` (n,) keeps leaves.

        Args:
            together, seen: (n,) int64, entries that all their heads may hold, and tokens so far.
            kept: Their spans, entries of which take no part; None: none.
        """
        n_heads, device, policy = table.n_kv_heads, table.lens.device, self._rules
        if kept is None:
            args = HeadRuleArgs(
                table.regions,
                chosen,
                tokens.all,
                policy.classes.table(device),
                table.head_rules,
                table.recent,
                seen,
                policy.quota(seen),
                together,
                policy.protect.sinks,
                window,
            )
            if table.quantized is None and ops.admit(args):
                table.trim()
                return
        sequences = chosen.cpu().numpy()
        slots = SlotView.of(table, (sequences[:, None] * n_heads + np.arange(n_heads)).ravel())
        rows, by_head = torch.from_numpy(slots.rows).to(device), (len(sequences), n_heads, -1)
        here = slots.positions.view(by_head)
        heads = Heads(
            slots.scores.view(by_head),
            here,
            policy.classes_of(tokens.at(chosen, here), here),
            table.head_rules[rows].view(by_head[:2]),
            seen,
            table.recent[rows].view(by_head)[:, 0, 0],
            together,
        )
        hidden = (here >= 0) & (seen[:, None, None] - here >= window) if window else torch.zeros_like(here).bool()
        out = hidden
        if kept is not None:
            masks = [kept.mask(s, own, policy.protect.sinks) for s, own in zip(sequences.tolist(), here, strict=True)]
            aside = torch.stack([torch.zeros_like(hidden[0]) if mask is None else mask for mask in masks])
            out, heads = hidden | aside, heads._replace(most=together - aside.sum((1, 2)))
        leave = hidden | policy.leaving(heads._replace(positions=here.masked_fill(out, -1)))
        if bool(leave.any()):
            table.shrink(sequences, slots.evict(leave.flatten(0, 1)).reshape(by_head[:2]))

    def _limits_of(self, table: PageTable) -> HeadLimits:
        known = self._limits
        if known is None or known.capacities is not table.capacities or known.kinds is not table.head_rules:
            most = table.budgets().astype(np.int64).sum(1)
            limited = (table.rules() < HeadRule.FULL).any(1) | (most < UNBOUNDED)
            device = table.lens.device
            everyone = torch.arange(len(most), device=device) if limited.all() else None
            known = self._limits = HeadLimits(
                table.capacities, table.head_rules, limited, torch.from_numpy(most).to(device), everyone
            )
        return known

    # ------------------------------------------------------------------ the batch

    def copy(self, sequences: list[int] | None = None) -> HeadRuleState:
        """Return a copy that changes on its own, of the given sequences in this order, or of all."""
        return HeadRuleState(self._rules, self._asked.copy(sequences))

    def join(self, other: HeadRuleState, n_seq: int) -> None:
        """Take over the sequences of `other`, after the `n_seq` of this batch."""
        self._asked.join(other._asked, n_seq)
