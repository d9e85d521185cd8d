"""CriticalKV: attention weighted by output effect of values (Feng et al., 2025, arXiv:2502.03805)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import ops
from millpond.kernels.decode_rules import Evict
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.methods._options import GrowOrEvict
from millpond.option_ranges import SHARE, Range
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import AccumulatedAttention, LastAttention, WindowAttention, WrappedScore
from millpond.policy.selection import keep_best
from millpond.policy.view import View, columns_of


@dataclass(frozen=True, slots=True)
class CriticalValues(WrappedScore):
    """Order by attention a_j first, then by (a_j + eps) * mean_h ||v_j W_h||_1.

    The best `first` of the free budget are chosen by attention. h runs over the query heads of the group, W_h is their
    part of the output projection. Entries of the first stage come before all others and keep their order. A norm is
    summed over at most `numbers` of the output's numbers, evenly spread; 0 for all.
    """

    first: float = 0.5
    eps: float = 1e-4
    numbers: int = 256
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first <= 1:
            raise OptionError(f"first={self.first} must lie in 0..1")
        if self.eps < 0:
            raise OptionError(f"eps={self.eps} must not be negative")
        if self.numbers < 0:
            raise OptionError(f"numbers={self.numbers} must not be negative; 0 sums over all of them")

    def score(self, view: View, seed: int) -> Tensor:
        attention = self.base.score(view, seed)
        free_entries = (view.budget - (view.valid & ~view.free).sum(1)).clamp(min=0)
        first = torch.tensor([math.floor(self.first * n) for n in free_entries.tolist()], device=free_entries.device)
        selected = keep_best(attention, view.free, torch.zeros_like(view.free), first)
        # only the others need their norms, at the cost of the whole output projection
        columns = (~selected).int().topk(int((~selected).sum(1).max()), dim=1).indices
        norms = effect_norms(columns_of(view.stored("values"), columns), view.output_maps, self.numbers)
        norms = norms.to(attention.dtype)
        value = torch.zeros_like(attention).scatter_(1, columns, (attention.gather(1, columns) + self.eps) * norms)
        above = torch.where(view.free, value, 0).amax()
        return torch.where(selected, 1 + above + attention, value)


def output_norms(values: Tensor, maps: Tensor) -> Tensor:
    """Return (H, N): mean over the group of ||v_j W_h||_1.

    values (H, N, D), maps (H * group, D, hidden size).
    """
    return ops.absolute_sums(values, maps.transpose(1, 2)) * len(values) / len(maps)


def effect_norms(values: Tensor, maps: Tensor, numbers: int) -> Tensor:
    """Return `output_norms` summed over at most `numbers` of the output; 0 for all.

    These are evenly spread, and the sum is scaled to that of all numbers.
    """
    step = -(-maps.shape[2] // numbers) if numbers else 1
    return output_norms(values, maps[..., ::step]) * step


@method("criticalkv", paper="arXiv:2502.03805")
def criticalkv(
    score: Annotated[str, "the method whose attention and protection are used: snapkv, h2o/sinks=0, ..."] = "snapkv",
    first: Annotated[float, "share of the free budget that attention alone fills first, 0 to 1", SHARE] = 0.5,
    eps: Annotated[float, "added to the attention in the second stage", Range(0.0, 1e6)] = 1e-4,
    numbers: Annotated[
        int, "numbers of the output, evenly spread, that a norm is summed over; 0 for all", Range(0, 2**20)
    ] = 256,
    decode: GrowOrEvict = "grow",
) -> Policy:
    """Keep what is attended to, then what is attended to and changes the layer's output most.

    First stage: the entries of highest attention a_j, `first` of the budget after the protected ones.
    Second stage: the highest (a_j + eps) * ||v_j W_O||_1 among the rest (Algorithm 1), which lowers the paper's bound
    on the change of the output. W_O is the part of the output projection of each query head, averaged over a group.

    Departs from the paper: under head budgets (ada, with this as its score) heads compete by the two-stage number and
    not by attention. The norm takes at most `numbers` numbers of an output. decode="evict" keeps the budget
    while decoding: each step ends with a plan, and is slow.
    """
    base = based_on("criticalkv", score)
    if not isinstance(base.score, AccumulatedAttention | LastAttention | WindowAttention):
        raise OptionError(f"criticalkv: score={score!r} is not an amount of attention that values could be weighed by")
    return replace(base, score=CriticalValues(base.score, first, eps, numbers), every_step=decode == "evict")
