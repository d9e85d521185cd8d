"""Companions: what a layer remembers of its sequences beside their entries; and the layer's state at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from millpond.cache.by_sequence import BySequence
from millpond.cache.focus import Focus, focus_of
from millpond.cache.headwise import Headwise
from millpond.cache.queries import QueryMemory
from millpond.cache.rolling import Rolling
from millpond.cache.rotation import Rotation
from millpond.cache.table import RegionTable
from millpond.policy.nested import NestedPolicy
from millpond.policy.policy import Policy


class Companion(Protocol):
    """One thing that is remembered of the sequences of a layer."""

    def copy(self, sequences: list[int] | None = None) -> Companion:
        """A copy that changes on its own, of the given sequences in this order, or of all; of none: as at first."""
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take over the sequences of `other`, of the same kind and layer, behind the `n_seq` of this batch."""
        ...


@dataclass(slots=True)
class Companions:
    """All that one layer remembers, shared by its parts; None for what its policy does without.

    Attributes:
        queries: the last queries, or sums over all.
        memories: what the last merge of a sequence left for the next.
        pending: tokens seen, for sequences with entries that no plan has seen.
        turns: position at which the newest turn of a sequence begins.
        rolling: the sinks and the frame of cache-relative positions.
        headwise: the prompt's queries, where each head has a rule of its own.
        focus: how the layer attends where it stores everything and attends to less.
    """

    queries: QueryMemory
    memories: BySequence[Tensor]
    pending: BySequence[int]
    turns: BySequence[int]
    rolling: Rolling | None
    headwise: Headwise | None
    focus: Focus | None

    @classmethod
    def of(cls, policy: Policy, layer: int, rotation: Rotation | None) -> Companions:
        """Those of a layer that has seen nothing; rotation: for policies with cache-relative positions."""
        return cls(
            QueryMemory(policy), BySequence(), BySequence(), BySequence(),
            Rolling(rotation, policy.protect.sinks) if rotation is not None else None,
            Headwise(policy) if isinstance(policy, NestedPolicy) else None,
            focus_of(policy, layer),
        )  # fmt: skip

    def copy(self, sequences: list[int] | None = None) -> Companions:
        """See `Companion.copy`."""
        copies: dict[str, Any] = {}
        for name in self.__slots__:
            part: Companion | None = getattr(self, name)
            copies[name] = None if part is None else part.copy(sequences)
        return Companions(**copies)

    def join(self, other: Companions, n_seq: int) -> None:
        """See `Companion.join`; the parts stay the ones that the layer's other parts know."""
        for name in self.__slots__:
            part: Companion | None = getattr(self, name)
            if part is not None:
                part.join(getattr(other, name), n_seq)

    def become(self, other: Companions) -> None:
        """Hold what `other` holds, for all parts of the layer that share this one."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))


@dataclass(slots=True)
class LayerState:
    """A layer's state at one moment; its pages are shared with the layer until one of the two writes."""

    table: RegionTable | None
    columns: int
    companions: Companions

    def release(self) -> None:
        """Let go of the pages."""
        if self.table is not None:
            self.table.clear()
            self.table = None
