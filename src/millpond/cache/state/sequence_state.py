"""Per-sequence state that a layer keeps besides the KV entries, and a snapshot of the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.per_sequence import PerSequence
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.cache.selective.protocol import SelectiveAttention, focus_of
from millpond.cache.state.frames import CacheRelativePositions
from millpond.cache.state.gap_closing import GapClosing
from millpond.cache.state.gate_context import GateContext
from millpond.cache.state.head_rules import HeadRuleState
from millpond.cache.state.query_buffer import QueryBuffer
from millpond.cache.state.rerotation import Rerotation
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import Recency


class StatePart(Protocol):
    """One thing that is remembered of the sequences of a layer."""

    def copy(self, sequences: list[int] | None = None) -> StatePart:
        """A copy that changes on its own, of the given sequences in this order, or of all; of none: as at first."""
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take over the sequences of `other`, of the same kind and layer, after the `n_seq` of this batch."""
        ...


@dataclass(slots=True)
class SequenceState:
    """All that one layer remembers, shared by its parts; None for what its policy does without.

    Attributes:
        queries: the last queries, or sums over all.
        memories: what the last merge of a sequence left for the next.
        pending: tokens seen, for sequences with entries that no plan has seen.
        turns: position at which the newest turn of a sequence begins.
        contexts: what trained gates have read of a sequence.
        ceilings: entries per KV head on average that plans while decoding may keep, where heads hold fewer.
        columns: column sums (H, N) float32 of the entries of a sequence that began with the pages of others, until its
            next pass, which writes them.
        rolling: the frames of cache-relative positions.
        origins: (H, n) int32: positions in the text of the entries that closed gaps left at 0 to n - 1; -1 for none.
        headwise: the prompt's queries, where each head has a rule of its own.
        focus: how the layer attends where it stores everything and attends to less.
    """

    queries: QueryBuffer
    memories: PerSequence[Tensor]
    pending: PerSequence[int]
    turns: PerSequence[int]
    contexts: PerSequence[GateContext]
    ceilings: PerSequence[int]
    columns: PerSequence[Tensor]
    origins: PerSequence[Tensor]
    rolling: CacheRelativePositions | None
    headwise: HeadRuleState | None
    focus: SelectiveAttention | None

    @classmethod
    def of(cls, policy: Policy, layer: int, rotation: RotaryEmbedding | None) -> SequenceState:
        """Those of a layer that has seen nothing; rotation: for policies with cache-relative positions."""
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
            None if rotation is None else _cache_relative(policy, rotation),
            None if needs.head_rules is None else HeadRuleState(needs.head_rules),
            focus_of(needs, layer),
        )

    @property
    def context_bytes(self) -> int:
        """Bytes of what gates have read; memory that sequences share counts once."""
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
        """See `StatePart.join`; the parts stay the ones that the layer's other parts know."""
        for name in self.__slots__:
            part: StatePart | None = getattr(self, name)
            if part is not None:
                part.join(getattr(other, name), n_seq)

    def become(self, other: SequenceState) -> None:
        """Hold what `other` holds, for all parts of the layer that share this one."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))


def _cache_relative(policy: Policy, rotation: RotaryEmbedding) -> CacheRelativePositions:
    """Sinks move to the recent entries at each step; where entries stay anywhere, gaps close now and then."""
    if isinstance(policy.score, Recency):
        return Rerotation(rotation, policy.protect.sinks)
    return GapClosing(rotation, rotation.reach)


@dataclass(slots=True)
class LayerSnapshot:
    """A layer's state at one moment; its pages are shared with the layer until one of the two writes."""

    table: PageTable | None
    columns: int
    companions: SequenceState

    def release(self) -> None:
        """Release the pages."""
        if self.table is not None:
            self.table.clear()
            self.table = None
