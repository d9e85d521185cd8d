"""QueryMemory: what a layer keeps of the queries of its sequences, for scores that ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.by_sequence import BySequence
from millpond.cache.rolling import Rotation
from millpond.policy.moments import QueryMoments
from millpond.policy.policy import Policy


class QueryMemory:
    """The last queries of each sequence, or sums over all of them; nothing where the score asks for neither."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: BySequence[tuple[Tensor, Tensor]] = BySequence()
        self._moments: BySequence[QueryMoments] = BySequence()

    def remember(self, sequence: int, q: Tensor, q_pos: Tensor, rope: Rotation | None) -> None:
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

    def _sum(self, sequence: int, q: Tensor, q_pos: Tensor, rope: Rotation | None) -> None:
        """Add queries to the moments of their sequence, without those of the sinks."""
        counts = q_pos >= self._policy.protect.sinks
        q, q_pos = q[:, counts], q_pos[counts]
        if self._policy.unrotates and rope is not None and len(q_pos):
            q = rope.rotate(q[None], q_pos[None].long(), inverse=True)[0]
        found = QueryMoments.of(q)
        self._moments[sequence] = self._moments[sequence] + found if sequence in self._moments else found

    def last(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The last queries (Hq, w, key_dim) of a sequence and their positions (w,)."""
        return self._last[sequence]

    def moments(self, sequence: int) -> QueryMoments | None:
        """Sums over the queries of a sequence so far; None where nothing was summed."""
        return self._moments.get(sequence)

    def copy(self, sequences: list[int] | None = None) -> QueryMemory:
        """A copy that changes on its own, of the given sequences in this order, or of all."""
        other = QueryMemory(self._policy)
        other._last, other._moments = self._last.copy(sequences), self._moments.copy(sequences)
        return other
