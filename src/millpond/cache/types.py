"""Values passed between the parts of a layer step: attention settings, new tokens, values per sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor


class Entries(NamedTuple):
    """Entries of one sequence for a plan: quantized and plain ones (padded), then new ones."""

    keys: Tensor  #: (H, N, key_dim)
    values: Tensor  #: (H, N, value_dim)
    positions: Tensor  #: (H, N) int32, -1 for none
    scores: Tensor  #: (H, N) float32
    log_masses: Tensor | None = None  #: (H, N) float32; None where entries have no masses
    n_quantized: int = 0  #: the first columns are the slots of the packed part, in order, tombstones at position -1
    complete: bool = False  #: known on the host: column i of every head is the token at position i, and none is missing


class PromptChunk(NamedTuple):
    """Many new tokens of one sequence, and the entries that they attend to."""

    sequence: int
    q: Tensor  #: (Hq, Q, key_dim)
    q_pos: Tensor  #: (Q,) int32, consecutive
    seen: int  #: position after the last of them
    entries: Entries  #: stored entries (padded), then those of the new tokens
    budget: Callable[[], int]  #: entries per KV head that the sequence may keep after this pass


def by_position(positions: Tensor) -> Tensor:
    """Return the column order (H, N): ascending positions, -1 last."""
    return torch.where(positions < 0, torch.iinfo(torch.int32).max, positions).argsort(dim=1, stable=True)


T = TypeVar("T")


class PerSequence(dict[int, T]):
    """Values by sequence, which are replaced and never written to, so that a copy shares them."""

    def copy(self, sequences: list[int] | None = None) -> PerSequence[T]:
        """Return an independent copy of the given sequences in this order, or of all."""
        if sequences is None:
            return PerSequence(self)
        return PerSequence({new: self[old] for new, old in enumerate(sequences) if old in self})

    def join(self, other: PerSequence[T], n_seq: int) -> None:
        """Take the values of the sequences of `other`, after the `n_seq` of this batch."""
        self.update({n_seq + sequence: value for sequence, value in other.items()})


class RotaryEmbedding(Protocol):
    """The rotary embedding of a model.

    Attributes:
        reach: Positions that the model was trained on.
    """

    reach: int

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Rotate x (B, H, n, D) to (or back from) positions (B, n), in float32 or wider."""
        ...
