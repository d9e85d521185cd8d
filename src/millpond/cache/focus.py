"""Focus: how a layer attends where a policy stores everything and attends to less of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from millpond.cache.parts import AttentionShape
from millpond.cache.recall import Recall
from millpond.cache.rotation import Rotation
from millpond.cache.skip import Skip
from millpond.cache.table import RegionTable
from millpond.policy.pattern import PatternPolicy
from millpond.policy.policy import Policy
from millpond.policy.recall import RecallPolicy


class Focus(Protocol):
    """The attention of one full layer, and what it remembers of each sequence.

    The layer stores everything: the entry at position p of a sequence lies in slot p of every head.
    """

    @property
    def truncatable(self) -> bool:
        """Whether the newest entries can be cut off without going back to a copy."""
        ...

    def attend(
        self, sequence: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, budget: int, shape: AttentionShape,
        rope: Rotation | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attention of new queries over stored and new entries, of all positions in order.

        Args:
            q: (Hq, Q, key_dim). k: (H, N, key_dim). v: (H, N, value_dim). q_pos: (Q,) int32, the last Q of 0 .. N - 1.
            budget: entries per head that a query may attend to. rope: how q and k are rotated; None: not at all.

        Returns:
            out (Hq, Q, value_dim); lse (Hq, Q) float32.
        """
        ...

    def decode(
        self, table: RegionTable, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, shape: AttentionShape,
        rope: Rotation | None,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Store the new entries and attend, as `LayerCache` does in a step; None: let it attend to everything."""
        ...

    def copy(self, sequences: list[int] | None = None) -> Focus:
        """A copy that changes on its own, of the given sequences in this order, or of all."""
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take over the sequences of `other`, of the same layer, behind the `n_seq` of this batch."""
        ...


def focus_of(policy: Policy, layer: int) -> Focus | None:
    """How a full layer attends for this policy; None: to everything that it stores."""
    if isinstance(policy, RecallPolicy):
        return Recall(policy)
    return Skip(policy, layer) if isinstance(policy, PatternPolicy) else None
