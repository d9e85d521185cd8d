"""Views of one sequence of a layer for a policy: its entries, and signals about them."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.head_rules import HeadRuleState
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.reconstruction import ReconstructionProbe
from millpond.cache.state.sequence_state import SequenceState
from millpond.cache.types import Entries
from millpond.errors import CacheMismatchError
from millpond.policy.policy import REDUCE, Policy
from millpond.policy.scores.query_moments import QueryMoments, QueryView
from millpond.policy.view import View, columns_of


class ViewBuilder:
    """The views of one layer, which read what the policy requests when it does.

    Attributes:
        repetition: What a repetition of the prompt has recorded; None outside the plans behind one.
    """

    def __init__(
        self, policy: Policy, tracker: PositionTracker, attention: PagedAttention, sequence_state: SequenceState
    ) -> None:
        self._policy = policy
        self._tracker = tracker
        self._attention = attention
        self._sequence_state = sequence_state
        self.repetition: ReconstructionProbe | None = None

    def of(
        self, table: PageTable, sequence: int, entries: Entries, positions: Tensor, order: Tensor | None, seen: int
    ) -> View:
        """Return the view of candidates of a table, their signal as `scores`, in the given order.

        Positions are -1 for candidates that the policy must not see. None: the order is that of the candidates, which
        are `complete`.
        """
        begin = self._sequence_state.turns.get(sequence, 0)
        view = View(
            columns_of(positions, order),
            columns_of(entries.scores, order),
            seen,
            self._attention.index,
            int(self._tracker.origin[sequence]),
            seen - begin if begin else 0,
            read_entries=lambda part: columns_of(self._attention.contents(table, entries, part), order),
            outputs=self._attention.outputs,
            memory=self._sequence_state.memories.get(sequence),
            log_masses=None if entries.log_masses is None else columns_of(entries.log_masses, order),
            recent_attention=lambda: columns_of(self._latest(sequence, entries), order),
            attention_rows=lambda head: _ordered(self._rows(sequence, entries, head), order, head),
            complete=order is None,
            prompts=self._sequence_state.prompts.get(sequence, ()),
        )
        if self._policy.sums_queries:
            view = self._with_moments(view, sequence)
        queries = None if self.repetition is None else self.repetition.queries(sequence)
        if queries is not None:
            rows = self._attention.look_back_rows
            view = replace(
                view, repeated_rows=lambda head: _ordered(rows(sequence, *queries, entries, head), order, head)
            )
        head_rules = self._sequence_state.head_rules
        if head_rules is None:
            return view
        assert order is not None, "a method whose heads have rules of their own is given an order"
        return self._with_rules(view, table, head_rules, sequence, entries, order)

    def of_all(self, sequence: int, n_regions: int, signal: Tensor | None, seen: int, device: torch.device) -> View:
        """Return the view of all `seen` tokens of a sequence in the regions of several layers.

        A policy whose score `is_by_region` reads no more.
        """
        begin = self._sequence_state.turns.get(sequence, 0)
        return View(
            torch.arange(seen, dtype=torch.int32, device=device).expand(n_regions, -1),
            signal,
            seen,
            self._attention.index,
            int(self._tracker.origin[sequence]),
            seen - begin if begin else 0,
            complete=True,
            prompts=self._sequence_state.prompts.get(sequence, ()),
        )

    def signal(self, sequence: int, entries: Entries) -> Entries:
        """Return candidates whose `scores` are the basis of the policy's score."""
        if not self._policy.window or self._policy.observes_all:
            return entries
        return entries._replace(scores=self._latest(sequence, entries))

    def moments(self, sequence: int) -> QueryMoments:
        """See `LayerCache.moments`."""
        moments = self._sequence_state.queries.moments(sequence)
        if moments is None:
            raise CacheMismatchError(
                f"layer {self._attention.index} has summed no queries: run a prompt with a score that asks"
            )
        return moments

    def _latest(self, sequence: int, entries: Entries) -> Tensor:
        """Return the attention of the last kept queries, (H, N) float32."""
        q, q_pos = self._sequence_state.queries.last(sequence)
        return self._attention.look_back(sequence, q, q_pos, entries, REDUCE[self._policy.reduce])

    def _rows(self, sequence: int, entries: Entries, head: int) -> Tensor:
        """Return attention of each of the last kept queries to one KV head, (group, w, N)."""
        q, q_pos = self._sequence_state.queries.last(sequence)
        return self._attention.look_back_rows(sequence, q, q_pos, entries, head)

    def _with_moments(self, view: View, sequence: int) -> QueryView:
        """Return the view with the moments of the queries of `sequence`."""
        rotary = self._attention.rotary
        return QueryView(
            **{part.name: getattr(view, part.name) for part in fields(view)},
            moments=self.moments(sequence),
            rotate=rotary.rotate if rotary is not None else None,
            scale=self._attention.shape.scale,
        )

    def _with_rules(
        self, view: View, table: PageTable, head_rules: HeadRuleState, sequence: int, entries: Entries, order: Tensor
    ) -> View:
        """Return the view with token ids, attention by query head, and the rules so far."""
        tokens, attention = self._tracker.tokens, self._attention
        assert tokens is not None, "token ids are kept for a policy that looks at them"

        def look(begin: int, end: int) -> Tensor:
            keys, n_kv_heads = attention.keys(sequence, entries), len(entries.positions)
            positions = entries.positions.expand(len(keys), -1)
            sums = head_rules.received(sequence, keys, positions, attention.shape, n_kv_heads, begin, end)
            return sums.gather(2, order[:, None].expand_as(sums))

        row = torch.tensor([sequence], device=order.device)
        view = replace(view, tokens=lambda: tokens.at(row, view.positions[None])[0], head_attention=look)
        if not view.turn:
            return view
        kinds = torch.from_numpy(table.rules()[sequence]).to(order.device)
        return replace(view, head_kinds=kinds, head_local=int(table.newest_protected()[sequence].max()))


def _ordered(rows: Tensor, order: Tensor | None, head: int) -> Tensor:
    """Return rows (group, w, N) of attention of a KV head in the order of its view."""
    return rows if order is None else rows[..., order[head]]
