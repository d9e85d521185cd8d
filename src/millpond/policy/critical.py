"""CriticalValues: attention weighed by what a value adds to the layer's output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.rules import Evict
from millpond.policy.over import OverScore
from millpond.policy.select import rank_by_value
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class CriticalValues(OverScore):
    """The best `first` of the free budget by attention a_j, the rest by (a_j + eps) * mean_h ||v_j W_h||_1.

    h runs over the query heads of the group, W_h is their part of the output projection. Those of the first stage
    come before all others and keep their order.
    """

    first: float = 0.5
    eps: float = 1e-4
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first <= 1:
            raise OptionError(f"first={self.first} must lie in 0..1")
        if self.eps < 0:
            raise OptionError(f"eps={self.eps} must not be negative")

    def score(self, view: View, seed: int) -> Tensor:
        attention = self.base.score(view, seed)
        value = (attention + self.eps) * output_norms(view.values, view.output_maps)
        room = (view.budget - (view.valid & ~view.free).sum(1)).clamp(min=0)
        first = torch.tensor([math.floor(self.first * n) for n in room.tolist()], device=value.device)
        rank = rank_by_value(attention, view.free, torch.zeros_like(view.free))
        chosen = view.free & (rank < first[:, None])
        above = torch.where(view.free, value, 0).amax()
        return torch.where(chosen, 1 + above + attention, value)


def output_norms(values: Tensor, maps: Tensor) -> Tensor:
    """(H, N): mean over the group of ||v_j W_h||_1, values (H, N, D), maps (H * group, D, hidden size)."""
    n_heads = len(values)
    norms = values.new_zeros(values.shape[:2])
    for index, matrix in enumerate(maps):
        head = index * n_heads // len(maps)
        norms[head] += (values[head] @ matrix.to(values.dtype)).abs().sum(-1)
    return norms * n_heads / len(maps)
