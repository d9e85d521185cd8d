"""Attention blended with redundancy: attended entries are kept unless similar keys are (R-KV)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import ops
from millpond.kernels.decode_rules import Evict
from millpond.policy.scores.attention import Score, WindowAttention
from millpond.policy.scores.wrapped import WrappedScore
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class ImportanceAndRedundancy(WrappedScore):
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
        likeness = mean_similarity(view.stored("keys"), view.valid, self.threshold, self.spared)
        redundancy = likeness.masked_fill(~view.valid, float("-inf")).softmax(1)
        return self.blend * self.base.score(view, seed) - (1 - self.blend) * redundancy


def mean_similarity(keys: Tensor, valid: Tensor, threshold: float, spared: int) -> Tensor:
    """(H, N): mean_i S_ij over the valid entries i of keys (H, N, D), ascending in position, 0 where invalid.

    The sums of whole columns are dot products with the sum of all keys; what is spared is then taken out of them.
    """
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if not bool(valid.all()):
        wide = wide.masked_fill(~valid[..., None], 0)
    length: Tensor = torch.linalg.vector_norm(wide, dim=-1)
    inverse: Tensor = 1 / length.clamp(min=1e-12)
    units = inverse[:, None] @ wide  # (H, 1, D), their sum
    total = (wide @ units.transpose(1, 2))[..., 0] * inverse - (length * inverse).square()  # without the diagonal
    if spared:
        at, cosines = ops.newest_alike(keys, valid.sum(1).int(), threshold, spared)
        total = total.scatter_add(1, at.clamp(min=0).long().flatten(1), -cosines.to(total.dtype).flatten(1))
    return total / valid.sum(1, keepdim=True).clamp(min=1)
