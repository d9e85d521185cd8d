"""One value per sequence of a batch, which follows the sequences when a batch is selected or joined."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class PerSequence(dict[int, T]):
    """Values by sequence: replaced, never written to, so that a copy shares them."""

    def copy(self, sequences: list[int] | None = None) -> PerSequence[T]:
        """A copy that changes on its own, of the given sequences in this order, or of all."""
        if sequences is None:
            return PerSequence(self)
        return PerSequence({new: self[old] for new, old in enumerate(sequences) if old in self})

    def join(self, other: PerSequence[T], n_seq: int) -> None:
        """Take over the values of the sequences of `other`, which come after the `n_seq` of this batch."""
        self.update({n_seq + sequence: value for sequence, value in other.items()})
