"""Allocation: how many entries each KV head of a layer keeps. Totals are exact, and no head is emptied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.policy.select import rank_by_value


class HeadAllocation(Protocol):
    """Splits the budget of a layer over its KV heads."""

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        """Entries to keep per head, (H,) int64, with sum = min(H * budget, entries) exactly.

        Args:
            value: (H, N) float, higher is kept. valid, pinned: (H, N) bool; pinned entries are kept before others.
            budget: entries per head on average.
        """
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every head keeps the same number."""

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        return valid.sum(1).clamp(max=budget)


@dataclass(frozen=True, slots=True)
class Ada:
    """Ada-KV: the heads of a layer compete in one top-k, each with a guaranteed floor (Feng et al., arXiv:2407.11550).

    Every head first keeps its protected entries and its best floor(alpha * (budget - protected)); the rest of
    H * budget goes to the highest values of all heads together. This minimises the paper's bound on the output error
    among all allocations that respect the floor.

    Departs from the paper: the official code blends and rounds, which loses up to H entries; here the floor is a
    true minimum and the total is exact.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise OptionError(f"alpha={self.alpha} must lie in 0..1")

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        n_heads = value.shape[0]
        protected = (pinned & valid).sum(1)
        floor = protected + (self.alpha * (budget - protected).clamp(min=0)).long()
        floor = torch.minimum(floor.clamp(min=1), valid.sum(1))
        rank = rank_by_value(value, valid, pinned)
        secured = valid & (rank < floor[:, None])
        left = min(n_heads * budget, int(valid.sum())) - int(secured.sum())
        if left <= 0:
            return secured.sum(1)
        open_value = torch.where(valid & ~secured, value.double(), float("-inf")).flatten()
        # a stable sort over (head, newest first) decides ties the same way every time
        order = torch.sort(open_value.view(n_heads, -1).flip(1).flatten(), descending=True, stable=True).indices[:left]
        chosen = torch.zeros_like(secured).flatten()
        chosen[order] = True
        return secured.sum(1) + chosen.view(n_heads, -1).sum(1)
