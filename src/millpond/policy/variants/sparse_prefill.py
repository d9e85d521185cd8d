"""Sparse patterns of a prompt, head by head; what they leave out is never computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from millpond.errors import CacheMismatchError
from millpond.kernels.reference import soft_cap, softmax_with_sink, wide
from millpond.policy.policy import Policy

#: Rows of queries that look at one set of entries.
BLOCK = 64


class HeadPrompt(NamedTuple):
    """The queries of one head, at positions N - Q .. N - 1, and all keys of its KV head."""

    q: Tensor  #: (Q, D)
    k: Tensor  #: (N, D)
    scale: float
    softcap: float = 0.0
    sink_logit: Tensor | None = None  #: a logit that only enters the denominator, of one number

    @property
    def first(self) -> int:
        """The position of the first query."""
        return len(self.k) - len(self.q)

    def last_rows(self, n: int) -> Tensor:
        """(n, N): the attention of the last n queries."""
        kind = wide(self.q.dtype)
        logits = soft_cap(self.q[-n:].to(kind) @ self.k.to(kind).T * self.scale, self.softcap)
        column = torch.arange(len(self.k), device=self.q.device)
        sink = None if self.sink_logit is None else self.sink_logit.to(kind).view(1, 1)
        return softmax_with_sink(logits, column <= column[-n:, None], sink)[0]


#: Of the queries at positions begin .. end - 1, one block: the positions (n,) that they look at, ascending. Each query
#: sees those that are not behind it and that `Pattern.near` does not hide from it.
Look = Callable[[int, int], Tensor]


class Pattern(Protocol):
    """How a head looks at a prompt."""

    @property
    def near(self) -> tuple[int, int] | None:
        """(first, width): entries from `first` on are seen by queries less than `width` behind; None: by all."""
        ...

    def covers(self, n: int) -> bool:
        """Whether every query of a text of `n` tokens sees everything."""
        ...

    def scaled(self, ratio: float) -> Pattern:
        """The pattern with `ratio` times as many entries."""
        ...

    def look(self, prompt: HeadPrompt) -> Look:
        """What the queries of a prompt look at, in blocks of BLOCK rows from the first query on."""
        ...


@dataclass(frozen=True, slots=True)
class SparsePrefillPolicy(Policy):
    """Nothing leaves, and decoding attends to everything; the queries of a prompt look at patterns of it.

    Attributes:
        pattern: of every head that the table does not name.
        table: by layer and query head.
    """

    pattern: Pattern = field(kw_only=True)
    table: Mapping[tuple[int, int], Pattern] = field(default_factory=dict)

    def patterns(self, layer: int, n_heads: int) -> list[Pattern]:
        """Of each query head of a layer.

        Raises:
            CacheMismatchError: the table names a head that there is not.
        """
        beyond = [head for at, head in self.table if at == layer and head >= n_heads]
        if beyond:
            raise CacheMismatchError(
                f"layer {layer} has {n_heads} query heads; the table of patterns names head {max(beyond)}: take one of "
                "this model"
            )
        return [self.table.get((layer, head), self.pattern) for head in range(n_heads)]
