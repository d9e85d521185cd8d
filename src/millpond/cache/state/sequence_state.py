"""State that a layer keeps per sequence in addition to KV entries: recent queries, and a snapshot of the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.selective import SelectiveAttention, selective_attention_of
from millpond.cache.state.gap_closing import GapClosing
from millpond.cache.state.gate_context import GateContext
from millpond.cache.state.head_rules import HeadRuleState
from millpond.cache.state.rerotation import CacheRelativePositions, Rerotation
from millpond.cache.types import PerSequence, RotaryEmbedding
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import Recency
from millpond.policy.scores.query_moments import QueryMoments
from millpond.prompt_marks import Span

#: Queries that are turned and summed at a time: few, so that they stay in the cache.
BLOCK = 256


class LastQueries(NamedTuple):
    """Last queries of a sequence."""

    q: Tensor  #: (Hq, w, key_dim)
    q_pos: Tensor  #: (w,) int32
    end: int  #: position after the last of them


class QueryBuffer:
    """Last queries of each sequence or sums over all; empty if the score needs neither.

    Args:
        policy: Policy of the layer.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: PerSequence[LastQueries] = PerSequence()
        self._moments: PerSequence[QueryMoments] = PerSequence()

    def remember(
        self, sequence: int, q: Tensor, q_pos: Tensor, span: tuple[int, int], rotary: RotaryEmbedding | None
    ) -> None:
        """Add queries at ascending positions, across chunks and planned steps.

        Nothing waits for the device, unless positions are left out of a span that begins among the sinks.

        Args:
            sequence: Sequence of the queries.
            q: Queries (Hq, Q, key_dim).
            q_pos: Positions (Q,) of the queries.
            span: The first of the positions, and the one after the last.
            rotary: How the layer has rotated the queries; None if it has not.
        """
        if self._policy.sums_queries:
            self._sum(sequence, q, q_pos, span, rotary)
        window = self._policy.window
        if not window:
            return
        old, missing = self._last.get(sequence), window - len(q_pos)
        if missing > 0 and old is not None and old.end == span[0]:
            last = torch.cat([old.q[:, -missing:], q], 1), torch.cat([old.q_pos[-missing:], q_pos])
        else:
            last = q[:, -window:].clone(), q_pos[-window:].clone()
        self._last[sequence] = LastQueries(*last, span[1])

    def _sum(
        self, sequence: int, q: Tensor, q_pos: Tensor, span: tuple[int, int], rotary: RotaryEmbedding | None
    ) -> None:
        """Add queries to the moments of their sequence, without those of the sinks."""
        n_sinks = max(self._policy.protect.sinks - span[0], 0)
        if n_sinks and span[1] - span[0] > len(q_pos):
            n_sinks = int((q_pos < self._policy.protect.sinks).sum())
        first = min(n_sinks, len(q_pos))
        moments = self._moments.get(sequence) or QueryMoments.of(q[:, :0])
        for start in range(first, len(q_pos), BLOCK):
            part = q[:, start : start + BLOCK]
            if self._policy.needs_unrotated_queries and rotary is not None:
                part = rotary.rotate(part[None], q_pos[None, start : start + BLOCK].long(), inverse=True)[0]
            moments = moments + QueryMoments.of(part)
        self._moments[sequence] = moments

    def last(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Return the last queries (Hq, w, key_dim) of a sequence and their positions (w,)."""
        q, q_pos, _ = self._last[sequence]
        return q, q_pos

    def moments(self, sequence: int) -> QueryMoments | None:
        """Return sums over the queries of a sequence so far; None if nothing was summed."""
        return self._moments.get(sequence)

    def adopt(self, sequence: int, queries: tuple[Tensor, Tensor] | QueryMoments) -> None:
        """Remember queries of a sequence that `last` or `moments` of another buffer returned."""
        if isinstance(queries, QueryMoments):
            self._moments[sequence] = queries
        else:
            q, q_pos = queries
            self._last[sequence] = LastQueries(q, q_pos, int(q_pos[-1]) + 1)

    def copy(self, sequences: list[int] | None = None) -> QueryBuffer:
        """Return an independent copy of the given sequences in this order, or of all."""
        other = QueryBuffer(self._policy)
        other._last, other._moments = self._last.copy(sequences), self._moments.copy(sequences)
        return other

    def join(self, other: QueryBuffer, n_seq: int) -> None:
        """Take the sequences of `other`, after the `n_seq` of this batch."""
        self._last.join(other._last, n_seq)
        self._moments.join(other._moments, n_seq)


class StatePart(Protocol):
    """Part of the state of the sequences of a layer."""

    def copy(self, sequences: list[int] | None = None) -> StatePart:
        """Return an independent copy of the given sequences in this order, or of all.

        A copy of no sequence is as a new part.
        """
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take the sequences of `other`, of the same layer, after the `n_seq` of this batch."""
        ...


@dataclass(slots=True)
class SequenceState:
    """State of the sequences of one layer, shared by its parts.

    A part is None if the policy does not need it.

    Attributes:
        queries: Last queries, or sums over all.
        memories: State that the last merge of a sequence left for the next.
        pending: Tokens seen, for sequences with entries that no plan has seen.
        turns: Position at which the newest turn of a sequence begins.
        prompts: [begin, end) of the prompts of a sequence, oldest first, for a policy that protects them.
        contexts: Tokens of a sequence that trained gates have read.
        ceilings: Entries per KV head on average that plans while decoding may keep, if heads hold fewer.
        columns: Column sums (H, N) float32 of the entries of a sequence that began with the pages of others, until its
            next pass, which writes them.
        origins: (H, n) int32: positions in the text of the entries that closed gaps left at 0 to n - 1; -1 for none.
        rolling: Frames of cache-relative positions.
        head_rules: Queries of the prompt, if each head has a rule of its own.
        selective: How the layer attends if it stores everything and attends to less.
    """

    queries: QueryBuffer
    memories: PerSequence[Tensor]
    pending: PerSequence[int]
    turns: PerSequence[int]
    prompts: PerSequence[tuple[Span, ...]]
    contexts: PerSequence[GateContext]
    ceilings: PerSequence[int]
    columns: PerSequence[Tensor]
    origins: PerSequence[Tensor]
    rolling: CacheRelativePositions | None
    head_rules: HeadRuleState | None
    selective: SelectiveAttention | None

    @classmethod
    def of(cls, policy: Policy, layer: int, rotary: RotaryEmbedding | None) -> SequenceState:
        """Return the state of a layer that has seen nothing.

        `rotary` is for policies with cache-relative positions.
        """
        needs = policy.needs
        return cls(
            QueryBuffer(policy),
            PerSequence(),
            PerSequence(),
            PerSequence(),
            PerSequence(),
            PerSequence(),
            PerSequence(),
            PerSequence(),
            PerSequence(),
            None if rotary is None else _cache_relative(policy, rotary),
            None if needs.head_rules is None else HeadRuleState(needs.head_rules),
            selective_attention_of(needs, layer),
        )

    @property
    def context_bytes(self) -> int:
        """Bytes of the contexts of gates; memory that sequences share counts once."""
        buffers = {id(context.buffer): context.nbytes for context in self.contexts.values()}
        return sum(buffers.values())

    def copy(self, sequences: list[int] | None = None) -> SequenceState:
        """See `StatePart.copy`."""
        copies: dict[str, Any] = {}
        for name in self.__slots__:
            part: StatePart | None = getattr(self, name)
            copies[name] = None if part is None else part.copy(sequences)
        return SequenceState(**copies)

    def join(self, other: SequenceState, n_seq: int) -> None:
        """See `StatePart.join`; the parts remain the objects that the layer's other parts use."""
        for name in self.__slots__:
            part: StatePart | None = getattr(self, name)
            if part is not None:
                part.join(getattr(other, name), n_seq)

    def become(self, other: SequenceState) -> None:
        """Take the state of `other`, for all parts of the layer that share this one."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))


def _cache_relative(policy: Policy, rotary: RotaryEmbedding) -> CacheRelativePositions:
    """Return the cache-relative positions of a policy.

    Sinks move to the recent entries at each step; if entries stay anywhere, gaps close now and then.
    """
    if isinstance(policy.score, Recency):
        return Rerotation(rotary, policy.protect.sinks)
    return GapClosing(rotary, rotary.reach)


@dataclass(slots=True)
class LayerSnapshot:
    """State of a layer at one moment.

    Its pages are shared with the layer until one of the two writes.
    """

    table: PageTable | None
    columns: int
    sequence_state: SequenceState

    def release(self) -> None:
        """Release the pages."""
        if self.table is not None:
            self.table.clear()
            self.table = None
