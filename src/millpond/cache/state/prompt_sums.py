"""Sums over the queries of a prompt's beginning, from which a later prompt with the same beginning continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.cache.state.head_rules import PromptQueries
from millpond.policy.policy import Policy
from millpond.policy.scores.query_moments import QueryMoments


class SumKind(NamedTuple):
    """Kind of sums of a method: equal if two methods have the same sums of one text."""

    columns: tuple[str, float] | None  #: how query heads become one number, and the decay; None: no column sums
    moments: tuple[bool, int] | None  #: whether queries are summed before RoPE, and from which position on; None: not
    queries: bool  #: whether the queries themselves are kept

    @classmethod
    def of(cls, policy: Policy) -> SumKind | None:
        """Return the kind of a policy; None if it needs no sums."""
        if not policy.sums_prompt:
            return None
        rules = policy.needs.head_rules
        return cls(
            (policy.reduce, policy.decay) if policy.observes_all else None,
            (policy.needs_unrotated_queries, policy.protect.sinks) if policy.sums_queries else None,
            rules is not None and rules.threshold < 1,
        )


class LayerSums(NamedTuple):
    """Sums of one layer over the queries of a text of N tokens; None for those a method lacks."""

    columns: Tensor | None  #: (H, N) float32, the attention that each entry has received
    moments: QueryMoments | None
    queries: PromptQueries | None  #: of the tokens that no earlier sums have

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        moments = () if self.moments is None else (self.moments.total, self.moments.outer)
        columns = () if self.columns is None else (self.columns,)
        return sum(t.numel() * t.element_size() for t in (*columns, *moments, *(self.queries or ())))


@dataclass(frozen=True, slots=True, eq=False)
class PromptSums:
    """Sums of all layers up to one position of a prompt.

    Attributes:
        length: Tokens of the prompt before that position.
        layers: Sums of each layer.
        before: Sums up to an earlier position, with the queries before `layers`; None for none.
    """

    length: int
    layers: list[LayerSums] = field(repr=False)
    before: PromptSums | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of these sums, without earlier ones."""
        return sum(layer.nbytes for layer in self.layers)

    def complete(self) -> list[LayerSums]:
        """Return the sums of all layers, with the queries of the whole text."""
        if self.before is None or all(layer.queries is None for layer in self.layers):
            return self.layers
        chain: list[PromptSums] = []
        sums: PromptSums | None = self
        while sums is not None:
            chain.append(sums)
            sums = sums.before
        parts = zip(*(sums.layers for sums in reversed(chain)), strict=True)
        return [of_layer[-1]._replace(queries=_joined(of_layer)) for of_layer in parts]


def _joined(parts: tuple[LayerSums, ...]) -> PromptQueries | None:
    """Return the queries of consecutive pieces of a text."""
    queries = [part.queries for part in parts if part.queries is not None]
    if not queries:
        return None
    q, lse, q_pos = zip(*queries, strict=True)
    return PromptQueries(torch.cat(q, 1), torch.cat(lse, 1), torch.cat(q_pos))
