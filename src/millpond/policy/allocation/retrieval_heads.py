"""Budgets of retrieval heads, with distant attention, and of streaming heads: sinks and newest (DuoAttention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import CacheMismatchError, OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.allocation.layers import LayerAllocation, apportion
from millpond.policy.scores.wrapped import WrappedScore
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class RetrievalHeads:
    """A KV head is a retrieval head if its number is above the threshold.

    Attributes:
        threshold: 0 to 1. sinks, recent: first and newest positions, the ones that are near.
        grows: retrieval heads keep all that comes while decoding.
        table: the numbers, a row per layer; empty: the share of the observed attention that goes beyond what is near.
    """

    threshold: float = 0.5
    sinks: int = 4
    recent: int = 64
    grows: bool = True
    table: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold={self.threshold} must lie in 0..1")

    def check(self, n_layers: int) -> None:
        if self.table and len(self.table) != n_layers:
            raise OptionError(f"a table of head classes for {len(self.table)} layers; the model has {n_layers}")

    def decide(self, view: View) -> DividedHeads:
        """Which heads of `view` are retrieval heads."""
        return DividedHeads(tuple(self.retrieval(view).tolist()), self.grows)

    def retrieval(self, view: View) -> Tensor:
        """(H,) bool.

        Raises:
            CacheMismatchError: the table is of another model.
        """
        if not self.table:
            return self._far_share(view) > self.threshold
        row = self.table[view.layer]
        if len(row) != len(view.positions):
            raise CacheMismatchError(
                f"layer {view.layer} has {len(view.positions)} KV heads, the table of head classes has {len(row)} there"
            )
        return torch.tensor(row, device=view.positions.device) > self.threshold

    def _far_share(self, view: View) -> Tensor:
        assert view.signal is not None, "the cache provides the signal that a score declares"
        attention = view.signal.double().masked_fill(~view.valid, 0)
        near = (view.positions < self.sinks) | (view.positions >= view.seen - self.recent)
        return attention.masked_fill(near, 0).sum(1) / attention.sum(1)

    def layer_share(self, view: View) -> float:
        """The share of a layer's heads that are retrieval heads."""
        return float(self.retrieval(view).double().mean())


@dataclass(frozen=True, slots=True)
class DividedHeads:
    """Streaming heads keep what is protected; retrieval heads have equal parts of the rest.

    What retrieval heads have no use for goes to the streaming heads, and all heads are alike if none is a retrieval
    head, so that the total is exact.
    """

    retrieval: tuple[bool, ...]
    grow: bool = False
    every: int = 0

    @property
    def grows(self) -> Tensor:
        return torch.tensor(self.retrieval) & self.grow

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        return protected.clamp(min=1)

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        entries = valid.sum(1).tolist()
        least = int(self.floor((pinned & valid).sum(1), budget).max())
        total = min(budget * len(entries), sum(entries))
        wanted = [float(total) if far else 0.0 for far in self.retrieval]
        return torch.tensor(apportion(wanted, total, least, entries), device=value.device)


@dataclass(frozen=True, slots=True)
class RetrievalLayers:
    """Every retrieval head of the model has the same budget, every streaming head what it protects.

    Attributes:
        shares: of each layer's KV heads that are retrieval heads.

    Example:
        >>> RetrievalLayers((1.0, 0.5, 0.0)).wanted(20, 8, [100] * 3)
        [32.0, 20.0, 8.0]
        >>> RetrievalLayers((1.0, 0.5, 0.0)).wanted(20, 8, [26] * 3)
        [26.0, 20.0, 14.0]
    """

    shares: tuple[float, ...]

    def check(self, n_layers: int) -> None:
        if len(self.shares) != n_layers:
            raise OptionError(f"shares of retrieval heads for {len(self.shares)} layers; the model has {n_layers}")

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        room = [max(m - least, 0) for m in most]
        rest = float((budget - least) * len(most))
        far = distribute(rest, self.shares, room)
        near = distribute(rest - sum(far), [1 - share for share in self.shares], room)
        return [least + a + b for a, b in zip(far, near, strict=True)]


@dataclass(frozen=True, slots=True)
class ProfiledLayers:
    """`RetrievalLayers` whose shares are known when all layers have read the prompt."""

    heads: RetrievalHeads

    def check(self, n_layers: int) -> None:
        """Fits every model."""

    def measure(self, view: View) -> float:
        """The share of a layer's heads that are retrieval heads."""
        return self.heads.layer_share(view)

    def decide(self, measured: Sequence[float]) -> LayerAllocation:
        """The allocation for layers of which this was measured."""
        return RetrievalLayers(tuple(measured))


def distribute(amount: float, weights: Sequence[float], room: Sequence[float]) -> list[float]:
    """Each weight times min(level, room), at the level where they add up to `amount`, or full.

    Example:
        >>> distribute(6.0, [1.0, 1.0, 0.5], [1.0, 9.0, 9.0])
        [1.0, 3.3333333333333335, 1.6666666666666667]
    """
    level = 0.0
    for top in sorted(set(room)):
        slope = sum(w for w, r in zip(weights, room, strict=True) if r >= top)
        if slope * (top - level) >= amount:
            level += amount / slope if slope else 0.0
            break
        amount -= slope * (top - level)
        level = float(top)
    return [w * min(level, r) for w, r in zip(weights, room, strict=True)]


@dataclass(frozen=True, slots=True)
class ThenRecency(WrappedScore):
    """Another score for the prompt; while decoding the oldest leave."""

    signal: Signal = Signal.NONE
    evict: Evict = Evict.OLDEST

    def score(self, view: View, seed: int) -> Tensor:
        return self.base.score(view, seed)
