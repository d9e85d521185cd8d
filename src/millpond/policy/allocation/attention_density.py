"""Layer budgets by attention density: layers with evenly spread attention get more of the budget (D2O)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from millpond.policy.allocation.layers import LayerAllocation, LayerTable
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class AttentionDensity:
    """Layer l has softmax_l(-f_l) of the budget, f_l the variance of the attention that its entries received.

    Attributes:
        scale: "relative": variances over the largest of all layers; "absolute": as they are; "heads": each head's
            within its layer, 0 for the smallest and 1 for the largest, and f_l is their mean.
    """

    scale: Literal["relative", "absolute", "heads"] = "relative"

    def check(self, n_layers: int) -> None:
        """Fits every model."""

    def measure(self, view: View) -> float:
        """f_l before it is compared with those of other layers: a mean over the heads."""
        assert view.signal is not None, "the cache provides the signal that a score declares"
        density = view.signal.double().masked_fill(~view.valid, 0)
        count = view.counts.double()
        spread = torch.where(view.valid, density - (density.sum(1) / count)[:, None], 0)
        variance = spread.square().sum(1) / (count - 1).clamp(min=1)
        if self.scale == "heads":
            low, high = variance.min(), variance.max()
            variance = (variance - low) / (high - low) if high > low else torch.zeros_like(variance)
        return float(variance.mean())

    def decide(self, measured: Sequence[float]) -> LayerAllocation:
        """The allocation for layers of which this was measured."""
        top = max(measured)
        if self.scale == "relative" and top > 0:
            measured = [f / top for f in measured]
        least = min(measured)
        return LayerTable(tuple(math.exp(least - f) for f in measured))
