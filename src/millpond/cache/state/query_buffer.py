"""Recent queries of each sequence, for scores that need them."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.per_sequence import PerSequence
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.policy.policy import Policy
from millpond.policy.scores.query_moments import QueryMoments

#: Queries that are turned and summed at a time: few, so that they stay in the cache.
BLOCK = 256


class QueryBuffer:
    """The last queries of each sequence, or sums over all of them; nothing where the score asks for neither."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: PerSequence[tuple[Tensor, Tensor]] = PerSequence()
        self._moments: PerSequence[QueryMoments] = PerSequence()

    def remember(self, sequence: int, q: Tensor, q_pos: Tensor, rope: RotaryEmbedding | None) -> None:
        """Take in queries (Hq, Q, key_dim) at positions (Q,), across chunks and planned steps.

        rope: how the layer has rotated them; None: not at all.
        """
        if self._policy.sums_queries:
            self._sum(sequence, q, q_pos, rope)
        window = self._policy.window
        if not window:
            return
        old = self._last.get(sequence)
        if old is not None and int(old[1][-1]) + 1 == int(q_pos[0]):
            q, q_pos = torch.cat([old[0], q], 1), torch.cat([old[1], q_pos])
        self._last[sequence] = (q[:, -window:].clone(), q_pos[-window:].clone())

    def _sum(self, sequence: int, q: Tensor, q_pos: Tensor, rope: RotaryEmbedding | None) -> None:
        """Add queries to the moments of their sequence, without those of the sinks."""
        first = int((q_pos < self._policy.protect.sinks).sum())
        found = self._moments.get(sequence) or QueryMoments.of(q[:, :0])
        for start in range(first, len(q_pos), BLOCK):
            part = q[:, start : start + BLOCK]
            if self._policy.needs_unrotated_queries and rope is not None:
                part = rope.rotate(part[None], q_pos[None, start : start + BLOCK].long(), inverse=True)[0]
            found = found + QueryMoments.of(part)
        self._moments[sequence] = found

    def last(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The last queries (Hq, w, key_dim) of a sequence and their positions (w,)."""
        return self._last[sequence]

    def moments(self, sequence: int) -> QueryMoments | None:
        """Sums over the queries of a sequence so far; None where nothing was summed."""
        return self._moments.get(sequence)

    def adopt(self, sequence: int, found: tuple[Tensor, Tensor] | QueryMoments) -> None:
        """Remember of a sequence what `last` or `moments` of another memory gave."""
        if isinstance(found, QueryMoments):
            self._moments[sequence] = found
        else:
            self._last[sequence] = found

    def copy(self, sequences: list[int] | None = None) -> QueryBuffer:
        """A copy that changes on its own, of the given sequences in this order, or of all."""
        other = QueryBuffer(self._policy)
        other._last, other._moments = self._last.copy(sequences), self._moments.copy(sequences)
        return other

    def join(self, other: QueryBuffer, n_seq: int) -> None:
        """Take over the sequences of `other`, after the `n_seq` of this batch."""
        self._last.join(other._last, n_seq)
        self._moments.join(other._moments, n_seq)
