"""Views of one sequence of a layer for a policy: its entries, and signals about them."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.head_rules import HeadRuleState
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.sequence_state import SequenceState
from millpond.cache.types import Entries
from millpond.errors import CacheMismatchError
from millpond.policy.policy import REDUCE, Policy
from millpond.policy.scores.query_moments import QueryMoments, QueryView
from millpond.policy.view import View, columns_of


class ViewBuilder:
    """The views of one layer: they read what the policy asks for when it asks."""

    def __init__(
        self, policy: Policy, tracker: PositionTracker, attention: PagedAttention, sequence_state: SequenceState
    ) -> None:
        self._policy = policy
        self._tracker = tracker
        self._attention = attention
        self._sequence_state = sequence_state

    def of(self, table: PageTable, sequence: int, found: Entries, positions: Tensor, order: Tensor, seen: int) -> View:
        """What the policy sees of candidates of a table, their signal as `scores`, in the given order.

        positions: of the candidates, -1 for those that it shall not see.
        """
        begin = self._sequence_state.turns.get(sequence, 0)
        view = View(
            columns_of(positions, order),
            columns_of(found.scores, order),
            seen,
            self._attention.index,
            int(self._tracker.origin[sequence]),
            seen - begin if begin else 0,
            read_entries=lambda part: columns_of(self._attention.contents(table, found, part), order),
            outputs=self._attention.outputs,
            memory=self._sequence_state.memories.get(sequence),
            log_masses=None if found.log_masses is None else columns_of(found.log_masses, order),
            recent_attention=lambda: columns_of(self._latest(sequence, found), order),
        )
        if self._policy.sums_queries:
            view = self._with_moments(view, sequence)
        head_rules = self._sequence_state.head_rules
        return view if head_rules is None else self._with_tokens(view, head_rules, sequence, found, order)

    def signal(self, sequence: int, found: Entries) -> Entries:
        """Candidates with what the policy's score is made of as `scores`."""
        if not self._policy.window or self._policy.observes_all:
            return found
        return found._replace(scores=self._latest(sequence, found))

    def moments(self, sequence: int) -> QueryMoments:
        """See `LayerCache.moments`."""
        found = self._sequence_state.queries.moments(sequence)
        if found is None:
            raise CacheMismatchError(
                f"layer {self._attention.index} has summed no queries: run a prompt with a score that asks"
            )
        return found

    def _latest(self, sequence: int, found: Entries) -> Tensor:
        """(H, N) float32: the attention of the last queries that are kept."""
        q, q_pos = self._sequence_state.queries.last(sequence)
        return self._attention.look_back(sequence, q, q_pos, found, REDUCE[self._policy.reduce])

    def _with_moments(self, view: View, sequence: int) -> QueryView:
        """The view, and the moments of the queries of `sequence`."""
        rotary = self._attention.rotary
        return QueryView(
            **{part.name: getattr(view, part.name) for part in fields(view)},
            moments=self.moments(sequence),
            rotate=rotary.rotate if rotary is not None else None,
            scale=self._attention.shape.scale,
        )

    def _with_tokens(self, view: View, head_rules: HeadRuleState, sequence: int, found: Entries, order: Tensor) -> View:
        """The view, with token ids and the attention by query head of candidates in the given order."""
        tokens, attention = self._tracker.tokens, self._attention
        assert tokens is not None, "token ids are kept for a policy that looks at them"

        def look(begin: int, end: int) -> Tensor:
            keys, n_kv_heads = attention.keys(sequence, found), len(found.positions)
            positions = found.positions.expand(len(keys), -1)
            sums = head_rules.received(sequence, keys, positions, attention.shape, n_kv_heads, begin, end)
            return sums.gather(2, order[:, None].expand_as(sums))

        row = torch.tensor([sequence], device=order.device)
        return replace(view, tokens=lambda: tokens.at(row, view.positions[None])[0], head_attention=look)
