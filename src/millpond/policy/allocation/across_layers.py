"""Layer budgets by competition: the entries of all layers and heads together compete for the whole budget (KVzip)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.policy.view import View


@dataclass(frozen=True, slots=True, eq=False)
class LayersByScore:
    """Which layers the entries of all layers are of, the best entry first.

    Attributes:
        order: (entries of all layers and KV heads,) int16, the layer of each. n_heads: KV heads of a layer.
    """

    order: Tensor
    n_heads: int

    def check(self, n_layers: int) -> None:
        """Fits every model."""

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        """Of the `len(most) * n_heads * budget` best entries those of each layer, by its KV heads."""
        best = self.order[: len(most) * self.n_heads * budget]
        return [count / self.n_heads for count in torch.bincount(best, minlength=len(most)).tolist()]


@dataclass(frozen=True, slots=True)
class AcrossLayers:
    """A layer has as many entries of the whole budget as it has among the highest scores of all layers.

    For scores that mean the same in every layer, and heads of a layer that compete without a floor: together one
    competition of all heads of the model, but that each layer has a whole number of entries per KV head.

    Attributes:
        sinks: first positions that stay in every head.
    """

    sinks: int = 0

    def check(self, n_layers: int) -> None:
        """Fits every model."""

    def measure(self, view: View) -> Tensor:
        """The scores of a layer's entries, (KV heads, entries) float32; inf of sinks, -inf where there is none."""
        assert view.signal is not None, "the cache provides the signal that a score declares"
        scores = view.signal.float().masked_fill(view.positions < self.sinks, torch.inf)
        return scores.masked_fill(~view.valid, -torch.inf)

    def decide(self, measured: Sequence[Tensor]) -> LayersByScore:
        """The allocation for layers of these scores."""
        scores = [one.flatten().cpu() for one in measured]  # layers may be on several devices
        layers = torch.repeat_interleave(torch.tensor([len(one) for one in scores])).short()
        return LayersByScore(layers[torch.cat(scores).argsort(descending=True)], len(measured[0]))
