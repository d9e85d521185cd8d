"""R-KV: importance without redundancy (Cai et al., NeurIPS 2025, arXiv:2505.24133)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import ops
from millpond.kernels.decode_rules import Evict
from millpond.methods import method
from millpond.methods._options import GroupReduce, SinksAdded
from millpond.option_ranges import POOL_WIDTHS, QUERIES, SHARE, SOME_POSITIONS, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Score, WindowAttention, WrappedScore
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
    """Return (H, N): mean_i S_ij over valid entries i of keys (H, N, D); 0 where invalid.

    Columns ascend in position. The sums of whole columns are dot products with the sum of all keys; what is spared is
    then taken out of them.
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


@method("rkv", paper="arXiv:2505.24133")
def rkv(
    blend: Annotated[float, "weight of importance against redundancy, 0 to 1 (the paper's lambda)", SHARE] = 0.1,
    window: Annotated[int, "last queries that vote; their entries always stay", QUERIES] = 8,
    kernel: Annotated[int, "width of the max pool over neighbouring positions", POOL_WIDTHS] = 7,
    threshold: Annotated[float, "cosine above which two keys say the same", Range(-1.0, 10.0)] = 0.5,
    spared: Annotated[int, "newest keys like a given one that do not count as redundant to it", Range(0, 16)] = 1,
    reduce: GroupReduce = "max",
    sinks: SinksAdded = 0,
    buffer: Annotated[
        int, "while decoding: entries that gather beyond the budget before they are compressed", SOME_POSITIONS
    ] = 128,
    decode: Annotated[Literal["evict", "grow"], "after the prompt: evict what the buffer holds, or grow"] = "evict",
) -> Policy:
    """Keep what the last queries attend to, unless other keys of the head say the same.

    s_j = lambda I_j - (1 - lambda) R_j. I is the attention of the last `window` queries, max-pooled over neighbours;
    R is the softmax over j of the mean over i of cos(k_i, k_j), without the diagonal and, for each key i, without the
    `spared` newest keys j whose cosine with it is above the threshold, so that the newest of a family stays.

    While decoding `buffer` entries gather; then the newest `window` queries choose again, and the budget is met. So up
    to buffer - 1 entries are held beyond it; buffer=1 never exceeds the budget, and is slow.

    Departs from the paper: attention is the model's own, over all that the queries see (the official code leaves the
    window out of its softmax). A key without similar keys spares none (the official code then spares position 0).
    decode="grow" plans at the end of prompts alone.
    """
    if decode == "grow" and buffer != 128:
        raise OptionError(
            f"rkv: buffer={buffer} is for decode='evict'; with 'grow' nothing leaves while decoding; leave it out"
        )
    return Policy(
        score=ImportanceAndRedundancy(WindowAttention(window=window, kernel=kernel), blend, threshold, spared),
        protect=Protect(sinks=sinks, recent=window),
        reduce=reduce,
        every_step=decode == "evict",
        plan_every=buffer if decode == "evict" else 1,
    )
