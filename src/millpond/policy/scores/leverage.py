"""Leverage of keys, blended with attention: keys that no others can represent, and attended entries (Compactor)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View

#: Added to the Gram matrix, as a share of its mean eigenvalue, so that it can be inverted.
RIDGE = 1e-6


@dataclass(frozen=True, slots=True)
class LeverageAndAttention:
    """s_j = blend * z(leverage_j) + z(attention_j), z to mean 0 and deviation 1 over all free entries of the layer.

    With blend None its weight is the share of the text that the budget does not hold.

    leverage_j = x_j^T (X^T X)^-1 x_j, x_j the centred keys, seen through a random Gaussian matrix of `sketch` columns
    where keys have more dimensions (0: never). attention_j = ||v_j|| * mean_i A_ij over the queries i since j was
    written, averaged over three neighbouring entries.
    """

    blend: float | None = None
    sketch: int = 48
    queries: Queries = "all"
    window: int = 0
    signal: Signal = Signal.SUM
    evict: Evict | None = None

    def __post_init__(self) -> None:
        for name, value in (("blend", self.blend), ("sketch", self.sketch)):
            if value is not None and value < 0:
                raise OptionError(f"{name}={value} must not be negative")

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache provides the signal that a score declares"
        mean = view.signal / (view.seen - view.positions).clamp(min=1)
        attention = torch.where(view.free, mean * view.values.norm(dim=-1), 0)
        smooth = F.avg_pool1d(attention[None], 3, stride=1, padding=1)[0]
        leverage = leverage_scores(view.keys, view.free, self.sketch, seed)
        blend = max(0.0, 1 - view.budget / view.seen) if self.blend is None else self.blend
        return (blend * standard(leverage, view.free) + standard(smooth, view.free)).float()


def leverage_scores(keys: Tensor, chosen: Tensor, sketch: int, seed: int) -> Tensor:
    """(H, N) float64: statistical leverage of the chosen keys (H, N, D) within their head; 0 for the others."""
    x = keys.double()
    if 0 < sketch < keys.shape[2]:
        make = torch.Generator().manual_seed(seed)
        x = x @ torch.randn(keys.shape[2], sketch, generator=make, dtype=x.dtype).to(x.device)
    count = chosen.sum(1)[:, None, None].clamp(min=1)
    x = torch.where(chosen[..., None], x, 0)
    x = torch.where(chosen[..., None], x - x.sum(1, keepdim=True) / count, 0)
    gram = x.transpose(1, 2) @ x
    ridge = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1) + torch.finfo(x.dtype).tiny
    eye = torch.eye(gram.shape[1], device=x.device)
    factor, _ = torch.linalg.cholesky_ex(gram + ridge[:, None, None] * eye)  # NaN goes through, for the plan to report
    white: Tensor = torch.linalg.solve_triangular(factor, x.transpose(1, 2), upper=False)
    return white.square().sum(1)


def standard(value: Tensor, chosen: Tensor) -> Tensor:
    """`value` (H, N) with mean 0 and deviation 1 over the chosen entries of all heads."""
    picked = value[chosen].double()
    if picked.numel() < 2:
        return torch.zeros_like(value)
    return (value - picked.mean()) / picked.std().clamp(min=1e-6)
