"""Selective attention: everything is stored, but each query reads only part of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.cache.selective.block_retrieval import BlockRetrieval
from millpond.cache.selective.sparse_prefill import SparsePrefill
from millpond.kernels.args import AttentionShape
from millpond.policy.needs import Needs


class SelectiveAttention(Protocol):
    """The attention of one full layer, and what it remembers of each sequence.

    The layer stores everything: the entry at position p of a sequence lies in slot p of every head.
    """

    @property
    def truncatable(self) -> bool:
        """Whether the newest entries can be cut off without going back to a copy."""
        ...

    def attend(
        self,
        sequence: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        budget: int,
        shape: AttentionShape,
        rope: RotaryEmbedding | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of new queries over stored and new entries, of all positions in order.

        Args:
            q: (Hq, Q, key_dim). k: (H, N, key_dim). v: (H, N, value_dim). q_pos: (Q,) int32, the last Q of 0 .. N - 1.
            budget: entries per head that a query may attend to. rope: how q and k are rotated; None: not at all.

        Returns:
            out (Hq, Q, value_dim); lse (Hq, Q) float32.
        """
        ...

    def decode(
        self,
        table: PageTable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        shape: AttentionShape,
        rope: RotaryEmbedding | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Store the new entries and attend, as `LayerCache` does in a step; None: let it attend to everything."""
        ...

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """All that is remembered of one sequence, for `adopt`."""
        ...

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """Hold one sequence, of which `tensors` gave this elsewhere.

        Raises:
            KeyError: a tensor is missing.
        """
        ...

    def copy(self, sequences: list[int] | None = None) -> SelectiveAttention:
        """A copy that changes on its own, of the given sequences in this order, or of all."""
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take over the sequences of `other`, of the same layer, after the `n_seq` of this batch."""
        ...


def focus_of(needs: Needs, layer: int) -> SelectiveAttention | None:
    """How a full layer attends for a policy with these needs; None: to everything that it stores."""
    if needs.block_lookup is not None:
        return BlockRetrieval(needs.block_lookup)
    return None if needs.prompt_patterns is None else SparsePrefill(needs.prompt_patterns, layer)
