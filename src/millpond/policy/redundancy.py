"""ImportanceAndRedundancy: what is attended to stays, unless other keys say the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import OptionError
from millpond.kernels.rules import Evict
from millpond.policy.over import OverScore
from millpond.policy.score import Score, WindowAttention
from millpond.policy.view import View

#: Columns of the similarity matrix that are looked at together; the matrix as a whole is never made.
BLOCK = 256


@dataclass(frozen=True, slots=True)
class ImportanceAndRedundancy(OverScore):
    """s_j = blend * importance_j - (1 - blend) * redundancy_j.

    Importance is `base`, by default the pooled attention of the last queries. Redundancy is the softmax over j
    of mean_i S_ij with S_ij = cos(k_i, k_j), 0 on the diagonal and where j is among the `spared` newest keys whose
    cosine with k_i is above `threshold`: of many keys that say the same the newest are not redundant.
    """

    base: Score = field(default_factory=lambda: WindowAttention(window=8))
    blend: float = 0.1
    threshold: float = 0.5
    spared: int = 1
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.blend <= 1:
            raise OptionError(f"blend={self.blend} must lie in 0..1")
        if self.spared < 0:
            raise OptionError(f"spared={self.spared} must not be negative")

    def score(self, view: View, seed: int) -> Tensor:
        likeness = mean_similarity(view.keys, view.valid, self.threshold, self.spared)
        redundancy = likeness.masked_fill(~view.valid, float("-inf")).softmax(1)
        return self.blend * self.base.score(view, seed) - (1 - self.blend) * redundancy


def mean_similarity(keys: Tensor, valid: Tensor, threshold: float, spared: int) -> Tensor:
    """(H, N): mean_i S_ij over the valid entries i of keys (H, N, D), ascending in position, 0 where invalid.

    The sums of whole columns are dot products with the sum of all keys; only what is spared needs the cosines
    themselves, from the newest columns on until every key has found its own. Memory: H * N * BLOCK numbers.
    """
    unit = F.normalize(keys, dim=-1)
    total = (unit * (unit.sum(1, keepdim=True) - unit)).sum(-1)  # without the diagonal
    wanted = torch.where(valid, spared, 0)
    for stop in range(keys.shape[1], 0, -BLOCK):
        if not bool((wanted > 0).any()):
            break
        start = max(0, stop - BLOCK)
        cosine = unit @ unit[:, start:stop].transpose(1, 2)
        similar = (cosine > threshold) & valid[:, None, start:stop]
        similar.diagonal(-start, 1, 2).fill_(False)
        rows = similar.any(2) & (wanted > 0)
        hits = similar[rows]
        is_newest = hits & (hits.int().flip(1).cumsum(1).flip(1) <= wanted[rows][:, None])
        total[:, start:stop].index_add_(0, rows.nonzero()[:, 0], torch.where(is_newest, -cosine[rows], 0))
        wanted[rows] -= hits.sum(1)
    return total / valid.sum(1, keepdim=True).clamp(min=1)
