"""Protocol of sparse prompt patterns per head; attention outside them is never computed (MInference)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from millpond.kernels.eager.softmax import soft_cap, softmax_with_sink, wide

#: Rows of queries that attend to one set of entries.
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


#: Of the queries at positions begin .. end - 1, one block: positions (n,) that they attend to, ascending. Each query
#: sees those that are not after it and that `Pattern.near` does not hide from it.
Look = Callable[[int, int], Tensor]


class Pattern(Protocol):
    """The attention pattern of a head on a prompt."""

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
        """The entries that the queries of a prompt attend to, in blocks of BLOCK rows from the first query on."""
        ...


class PromptPatterns(Protocol):
    """The attention patterns of each layer's heads on a prompt."""

    def patterns(self, layer: int, n_heads: int) -> list[Pattern]:
        """Pattern of each query head of a layer.

        Raises:
            CacheMismatchError: a head is named that there is not.
        """
        ...
