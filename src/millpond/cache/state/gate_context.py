"""Context of a gate: a narrow key and value of each token of a sequence, in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.policy.trained.networks import CONTEXT_DTYPE

#: A full buffer grows by this share of what it holds, and at least by this number of tokens.
GROWTH, LEAST_GROWTH = 0.125, 16


@dataclass(slots=True)
class _Buffer:
    """Memory that several sequences may share up to their own lengths; only the longest one writes behind itself."""

    rows: Tensor  # (2, capacity, width): keys, values
    filled: int = 0


@dataclass(frozen=True, slots=True)
class GateContext:
    """The tokens of one sequence of one layer. Appending leaves this one as it is, so that copies can share it.

    Attributes:
        length: Tokens.
    """

    buffer: _Buffer
    length: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> GateContext:
        """Of some tokens alone. keys, values: (n, width)."""
        return cls(_Buffer(torch.stack([keys, values]).to(CONTEXT_DTYPE), len(keys)), len(keys))

    @property
    def keys(self) -> Tensor:
        """(length, width)."""
        return self.buffer.rows[0, : self.length]

    @property
    def values(self) -> Tensor:
        """(length, width)."""
        return self.buffer.rows[1, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it lies in, what is free in it and what others share included."""
        return self.buffer.rows.nbytes

    def extended(self, before: int, keys: Tensor, values: Tensor) -> GateContext:
        """Return the first `before` tokens, and those of keys and values (n, width) behind them.

        Fewer than there are take the last ones back, as when a pass is repeated.
        """
        assert before <= self.length, "a gate has read every token before"
        n, buffer = len(keys), self.buffer
        if before != buffer.filled or before + n > buffer.rows.shape[1]:
            spare = max(LEAST_GROWTH, int(GROWTH * (before + n))) if n < LEAST_GROWTH else 0
            rows = buffer.rows.new_empty(2, before + n + spare, buffer.rows.shape[2])
            rows[:, :before] = buffer.rows[:, :before]
            buffer = _Buffer(rows, before)
        buffer.rows[0, before : before + n] = keys
        buffer.rows[1, before : before + n] = values
        buffer.filled = before + n
        return GateContext(buffer, before + n)
