"""Layer budgets in which lazy layers keep sinks and the newest tokens only (SimLayerKV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.errors import OptionError
from millpond.policy.allocation.layers import LayerAllocation
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class LazyLayers:
    """A layer is lazy if its queries pay more than `threshold` of their attention to the sinks and the newest tokens.

    Attributes:
        threshold: of the attention, 0 to 1. sinks, recent: how many first and newest positions count.
    """

    threshold: float = 0.9
    sinks: int = 4
    recent: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold={self.threshold} is a share of the attention, 0 to 1")

    def check(self, n_layers: int) -> None:
        """Fits every model."""

    def measure(self, view: View) -> float:
        """The share of a layer's attention, over all its heads, that stays with the sinks and the newest tokens."""
        assert view.signal is not None, "the cache provides the signal that a score declares"
        attention = view.signal.double().masked_fill(~view.valid, 0)
        near = (view.positions < self.sinks) | (view.positions >= view.seen - self.recent)
        return float(attention.masked_fill(~near, 0).sum() / attention.sum())

    def decide(self, measured: Sequence[float]) -> LayerAllocation:
        """The allocation for layers of which this was measured."""
        return Divided(tuple(share > self.threshold for share in measured))


@dataclass(frozen=True, slots=True)
class Divided:
    """Lazy layers have what they protect, and the others share the rest evenly; all have the same if all are lazy."""

    lazy: tuple[bool, ...]

    def check(self, n_layers: int) -> None:
        """Made for the layers that were measured."""

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        eager = len(self.lazy) - sum(self.lazy)
        if not eager:
            return [float(budget)] * len(self.lazy)
        rest = (budget * len(self.lazy) - least * sum(self.lazy)) / eager
        return [float(least) if lazy else rest for lazy in self.lazy]
