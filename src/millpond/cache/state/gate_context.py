"""Context of a gate: a narrow key and value of each token of a sequence, in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.policy.trained.networks import CONTEXT_DTYPE

#: A full buffer grows by this share of what it holds, and at least by this number of tokens.
GROWTH, MIN_GROWTH = 0.125, 16


@dataclass(slots=True)
class _Buffer:
    """Memory that several sequences may share up to their own lengths.

    Only the longest one writes after its end.
    """

    rows: Tensor  # (2, capacity, width): keys, values
    filled: int = 0


@dataclass(frozen=True, slots=True)
class GateContext:
    """Tokens of one sequence of one layer.

    Appending does not change it, so that copies can share it.

    Attributes:
        buffer: Memory of the tokens.
        length: Number of tokens.
    """

    buffer: _Buffer
    length: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> GateContext:
        """Return the context of keys and values (n, width) of some tokens alone."""
        return cls(_Buffer(torch.stack([keys, values]).to(CONTEXT_DTYPE), len(keys)), len(keys))

    @property
    def keys(self) -> Tensor:
        """Keys, (length, width)."""
        return self.buffer.rows[0, : self.length]

    @property
    def values(self) -> Tensor:
        """Values, (length, width)."""
        return self.buffer.rows[1, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer, with free memory and what other sequences share."""
        return self.buffer.rows.nbytes

    def extended(self, before: int, keys: Tensor, values: Tensor) -> GateContext:
        """Return the first `before` tokens, then those of keys and values (n, width).

        A `before` below the length removes the last tokens, as when a pass is repeated.
        """
        assert before <= self.length, "a gate has read every token before"
        n, buffer = len(keys), self.buffer
        if before != buffer.filled or before + n > buffer.rows.shape[1]:
            spare = max(MIN_GROWTH, int(GROWTH * (before + n))) if n < MIN_GROWTH else 0
            rows = buffer.rows.new_empty(2, before + n + spare, buffer.rows.shape[2])
            rows[:, :before] = buffer.rows[:, :before]
            buffer = _Buffer(rows, before)
        buffer.rows[0, before : before + n] = keys
        buffer.rows[1, before : before + n] = values
        buffer.filled = before + n
        return GateContext(buffer, before + n)
