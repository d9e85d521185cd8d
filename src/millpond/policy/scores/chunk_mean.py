"""Scores averaged over chunks of text, which are kept or evicted whole (ChunkKV)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict
from millpond.policy.scores.wrapped import WrappedScore
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class ChunkMean(WrappedScore):
    """s_j = the mean of another score over the unprotected entries of j's chunk of `size` positions.

    Entries of a chunk are equal, and ties go to the newest: of the last chunk that fits in part the newest stay.
    """

    size: int = 10
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise OptionError(f"chunk={self.size} must be at least 1")

    def score(self, view: View, seed: int) -> Tensor:
        value = self.base.score(view, seed)
        n_chunks = -(-view.seen // self.size)
        chunk = torch.where(view.free, view.positions.long() // self.size, n_chunks)
        none = value.new_zeros(len(value), n_chunks + 1)
        count = none.scatter_add(1, chunk, torch.ones_like(value)).clamp(min=1)
        mean = none.scatter_add(1, chunk, torch.where(view.free, value, 0)) / count
        return torch.where(view.free, mean.gather(1, chunk), value)
