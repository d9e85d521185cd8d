"""ChunkKV: chunks of text kept or evicted as a whole (Liu et al., NeurIPS 2025, arXiv:2502.00299)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.methods._options import GrowOrEvict
from millpond.option_ranges import SOME_POSITIONS
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import WrappedScore
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class ChunkMean(WrappedScore):
    """s_j = the mean of a score over the unprotected entries of j's chunk of `size` positions.

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


@method("chunkkv", paper="arXiv:2502.00299")
def chunkkv(
    score: Annotated[str, "the method whose score and protection are used: snapkv, h2o, knorm/sinks=4, ..."] = "snapkv",
    chunk: Annotated[int, "positions of a chunk", SOME_POSITIONS] = 10,
    decode: GrowOrEvict = "grow",
) -> Policy:
    """Keep whole chunks of neighbouring entries, by the mean of any method's score, per head.

    The text is cut into chunks of `chunk` positions from its start; a chunk is worth the mean score of its entries
    (Algorithm 1), and the best chunks stay with what the other method protects. The paper's chunk size is the default.

    Departs from the paper: the budget is met exactly, so of the last chunk only the newest entries may stay, and so
    may those of a chunk that reaches into the protected window. Layers do not reuse each other's chunks, which saves
    time and not memory. The paper's score is not pooled; score="snapkv" brings its pool. decode="evict" keeps the
    budget while decoding: the worst chunk leaves entry by entry. Each step ends with a plan, and is slow.
    """
    base = based_on("chunkkv", score)
    assert base.score is not None, "a base has a score"
    return replace(base, score=ChunkMean(base.score, chunk), every_step=decode == "evict")
