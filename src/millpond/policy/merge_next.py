"""IntoNext: values that leave are spread over the kept entries right behind them (CaM)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.reference import hash_priority
from millpond.kernels.rules import Evict
from millpond.policy.merge import Merged, own_scores
from millpond.policy.over import OverScore
from millpond.policy.score import AccumulatedAttention, Score
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class NewestStay(OverScore):
    """s_j = position of j; the attention of `base` is gathered for what merges by it."""

    base: Score = field(default_factory=AccumulatedAttention)
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True, slots=True)
class IntoNext:
    """V_j += p_i V_i / n for each j of the n kept entries right behind entry i, at most `targets`; keys stay.

    p_i = clamp(a_i / A, 0, 1), a the attention of `base` and A over what `over` says: the mean of the targets'
    attention, the mean of the kept entries behind the sinks, or the largest of all kept entries. With `draw` a value
    is merged whole with probability p_i, or not at all: the draw is a hash of seed, layer, head and position. With
    `bias` n masses of p_i / n go with the values, and V_j is the mean by mass.

    Attributes:
        targets: 0 for all kept entries behind.
    """

    base: Score
    targets: int = 16
    over: Literal["targets", "recent", "max"] = "targets"
    draw: bool = False
    bias: bool = False
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.targets < 0:
            raise OptionError(f"targets={self.targets} must not be negative; 0 takes all kept entries behind")

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        begin = keep.cumsum(1)  # kept entries in order have ranks 0, 1, ...; this is the first one behind a column
        kept = begin[:, -1:]
        end = torch.minimum(begin + (self.targets or kept), kept)
        leaves = view.valid & ~keep & (end > begin)
        share = torch.where(leaves, self.chances(view, keep, begin, end, seed) / (end - begin).clamp(min=1), 0)
        masses = view.masses[..., None]
        old = torch.cat([masses * view.values, masses], 2)
        given = spread(share[..., None] * old, share > 0, begin, end, keep)
        takes = given[..., -1] > 0
        new = old + given
        values = new[..., :-1] / new[..., -1:] if self.bias else new[..., :-1]
        values = torch.where(takes[..., None], values.to(view.values.dtype), view.values)
        log_masses = torch.where(takes, new[..., -1], masses[..., 0]).log().float()
        return Merged(view.keys, values, log_masses, own_scores(view))

    def chances(self, view: View, keep: Tensor, begin: Tensor, end: Tensor, seed: int) -> Tensor:
        """(H, N) float64: p of each entry whose targets have ranks begin..end (H, N), or what was drawn with it."""
        attention = self.base.score(view, seed).double().masked_fill(~view.valid, 0)
        against = self._against(view, attention.masked_fill(~keep, 0), keep, begin, end)
        p = torch.where(against > 0, attention / against, (attention > 0).double()).clamp(0, 1)
        if not self.draw:
            return p
        return (hash_priority(seed, view.heads, view.positions).double() / 2**24 < p).double()

    def _against(self, view: View, of_kept: Tensor, keep: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """(H, N) or (H, 1): A, given the attention of the kept entries, 0 elsewhere."""
        if self.over == "max":
            return of_kept.amax(1, keepdim=True)
        if self.over == "recent":
            recent = keep & (view.positions >= self.sinks)
            return of_kept.masked_fill(~recent, 0).sum(1, keepdim=True) / recent.sum(1, keepdim=True).clamp(min=1)
        below = of_kept.new_zeros(len(keep), keep.shape[1] + 1).scatter_add(1, begin, of_kept).cumsum(1)
        return (below.gather(1, end) - below.gather(1, begin)) / (end - begin).clamp(min=1)


def spread(x: Tensor, gives: Tensor, begin: Tensor, end: Tensor, keep: Tensor) -> Tensor:
    """(H, N, D) float64: for each kept column the sum of x (H, N, D) over the columns that give to its rank.

    Column i `gives` (H, N) to the kept columns of ranks begin_i to end_i - 1.
    """
    n_heads, n, dim = x.shape
    change = torch.cat([x, gives[..., None]], 2).double() * gives[..., None]
    columns = (n_heads, n, dim + 1)
    by_rank = change.new_zeros(n_heads, n + 1, dim + 1)
    by_rank.scatter_add_(1, begin[..., None].expand(columns), change)
    by_rank.scatter_add_(1, end[..., None].expand(columns), -change)
    sums = by_rank.cumsum(1)
    sums = torch.where(sums[..., -1:] > 0.5, sums, 0)[..., :-1]  # without the rounding of sums that ended
    rank = (keep.cumsum(1) - 1).clamp(min=0)
    return torch.where(keep[..., None], sums.gather(1, rank[..., None].expand_as(x)), 0)
