"""Layer budgets: the split of a budget over layers, by fixed shares, or by competition of all entries (KVzip)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Score
from millpond.policy.view import View


class LayerAllocation(Protocol):
    """Split of the total budget over the layers."""

    def check(self, n_layers: int) -> None:
        """Check that the allocation fits a model of this many layers.

        Raises:
            OptionError: it does not fit a model of this many layers.
        """
        ...

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        """Return the entries per KV head that each layer should have.

        Their sum is len(most) * budget.

        Args:
            budget: Entries per KV head, on average over the layers.
            least: Entries that every layer protects.
            most: Entries that exist to be kept, per layer.
        """
        ...


@runtime_checkable
class PromptLayers(Protocol):
    """Allocation that depends on the prompt.

    Every layer is measured when all of them have read it.
    """

    def check(self, n_layers: int) -> None:
        """Check as `LayerAllocation.check` does."""
        ...

    def measure(self, view: View) -> Any:
        """Return what the allocation needs to know of one layer."""
        ...

    def decide(self, measured: Sequence[Any]) -> LayerAllocation:
        """Return the allocation for the measurements of all layers."""
        ...


@dataclass(frozen=True, slots=True)
class EvenLayers:
    """Allocation of the same budget to every layer; what one cannot use goes to no other."""

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        return [float(budget)] * len(most)


@dataclass(frozen=True, slots=True)
class Pyramid:
    """Budgets that fall from the first layer to the last on a straight line (PyramidKV).

    arXiv:2406.02069. With b = budget - protected, the line runs from 2 b - b / beta down to b / beta. Where the first
    layer would have more than there is, the line starts at that and ends as much higher as the mean asks.

    Example:
        >>> split_budget(Pyramid(beta=20), 96, 0, [1000] * 4)
        [187, 126, 66, 5]
        >>> split_budget(Pyramid(beta=20), 96, 0, [150] * 4)
        [150, 114, 78, 42]
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise OptionError(f"beta={self.beta} must be at least 1; 1 gives every layer the same")

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        free = budget - least
        first = min(free * (2 - 1 / self.beta), max(most) - least)
        steps = max(len(most) - 1, 1)
        if len(most) == 1:
            first = free
        return [least + first - 2 * (first - free) * layer / steps for layer in range(len(most))]


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Weights chosen beforehand: layer l has weight_l / mean(weights) times the budget.

    Fewer weights than layers are spread evenly from the first layer to the last, with straight lines between them.

    Example:
        >>> LayerTable((3.0, 1.0)).wanted(10, 0, [99] * 3)
        [15.0, 10.0, 5.0]
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0 <= w < math.inf for w in self.weights) or not any(self.weights):
            raise OptionError(
                f"layer weights {';'.join(f'{w:g}' for w in self.weights)}: none may be negative or infinite, and one "
                "must be above 0"
            )

    def check(self, n_layers: int) -> None:
        if len(self.weights) > n_layers:
            raise OptionError(
                f"{len(self.weights)} layer weights for a model of {n_layers} layers; give one per layer, or fewer"
            )

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        weights = [self._weight(layer / max(len(most) - 1, 1)) for layer in range(len(most))]
        return [budget * len(most) * weight / sum(weights) for weight in weights]

    def _weight(self, depth: float) -> float:
        """Return the weight at `depth`, from 0 for the first layer to 1 for the last."""
        place = depth * (len(self.weights) - 1)
        before = min(int(place), max(len(self.weights) - 2, 0))
        after = min(before + 1, len(self.weights) - 1)
        return self.weights[before] + (self.weights[after] - self.weights[before]) * (place - before)


def split_budget(layers: LayerAllocation, budget: int, min_entries: int, max_entries: Sequence[int]) -> list[int]:
    """Return entries per KV head of each layer, with sum = len(max_entries) * budget exactly.

    No layer has fewer than `min_entries`, or more than its `max_entries`; what one cannot use goes to the others. If
    all entries fit, nothing is shared out, and every layer has `budget`.
    """
    fits = sum(max_entries) <= len(max_entries) * budget
    if isinstance(layers, EvenLayers) or fits or budget <= min_entries:
        return [budget] * len(max_entries)
    return apportion(
        layers.wanted(budget, min_entries, max_entries), len(max_entries) * budget, min_entries, max_entries
    )


def apportion(wanted: Sequence[float], total: int, min_count: int, max_counts: Sequence[int]) -> list[int]:
    """Return whole numbers in the proportions of `wanted`, with the given sum exactly.

    What goes beyond `min_count` is scaled by one common factor until the sum is right; the rounding gives the largest
    remainders one more, ties to the first.

    Args:
        wanted: Proportions, one per number.
        total: Sum, from that of the lower bounds to that of the upper ones.
        min_count: Lower bound of every number.
        max_counts: Upper bound of each number.

    Example:
        >>> apportion([6.5, 2.5, 0.0], 9, 1, [5, 9, 9])
        [5, 3, 1]
    """
    low = [min(min_count, m) for m in max_counts]
    exact = [float(n) for n in low]
    pull = [max(w - n, 0.0) for w, n in zip(wanted, low, strict=True)]
    open_layers = [i for i, m in enumerate(max_counts) if m > low[i]]
    while open_layers:
        remaining = (
            total - sum(n for i, n in enumerate(exact) if i not in open_layers) - sum(low[i] for i in open_layers)
        )
        if not any(pull[i] > 0 for i in open_layers):
            pull = [1.0] * len(pull)
        factor = remaining / sum(pull[i] for i in open_layers)
        full = [i for i in open_layers if low[i] + factor * pull[i] > max_counts[i]]
        for i in full or open_layers:
            exact[i] = float(max_counts[i]) if full else low[i] + factor * pull[i]
        open_layers = [i for i in open_layers if i not in full] if full else []
    exact = [round(n, 9) for n in exact]  # so that ties are ties
    counts = [math.floor(n) for n in exact]
    order = sorted(range(len(exact)), key=lambda i: (round(counts[i] - exact[i], 9), i))
    for i in [i for i in order if counts[i] < max_counts[i]][: total - sum(counts)]:
        counts[i] += 1
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class LayersByScore:
    """Layers of the entries of all layers, the best entry first.

    Attributes:
        order: (entries of all layers and KV heads,) int16, the layer of each.
        n_heads: KV heads of a layer.
    """

    order: Tensor
    n_heads: int

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        """Return how many of the `len(most) * n_heads * budget` best entries each layer has.

        They are counted per KV head of the layer.
        """
        best = self.order[: len(most) * self.n_heads * budget]
        return [count / self.n_heads for count in torch.bincount(best, minlength=len(most)).tolist()]


@dataclass(frozen=True, slots=True)
class AcrossLayers:
    """Budget by a competition of the entries of all layers.

    A layer gets as much of the whole budget as it has entries among the highest scores of all layers.

    For scores that mean the same in every layer, and heads of a layer that compete without a floor: together one
    competition of all heads of the model, but that each layer has a whole number of entries per KV head.

    Attributes:
        protect: Entries that stay in every head of every layer.
        score: Score of the entries; None for the signal itself.
    """

    protect: Protect = field(default_factory=Protect)
    score: Score | None = None

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def measure(self, view: View) -> Tensor:
        """Return the scores of a layer's entries, (KV heads, entries) float32.

        inf for protected ones, -inf where there is no entry.
        """
        pinned = self.protect.mask(view, view.budget, view.turn)
        if self.score is None:
            assert view.signal is not None, "the cache provides the signal that a score declares"
            scores = view.signal
        else:
            scores = self.score.score(replace(view, pinned=pinned), 0)
        return scores.float().masked_fill(pinned, torch.inf).masked_fill(~view.valid, -torch.inf)

    def decide(self, measured: Sequence[Tensor]) -> LayersByScore:
        """Return the allocation for layers with these scores."""
        scores = [layer_scores.flatten().cpu() for layer_scores in measured]  # layers may be on several devices
        layers = torch.repeat_interleave(torch.tensor([len(layer_scores) for layer_scores in scores])).short()
        return LayersByScore(layers[torch.cat(scores).argsort(descending=True)], len(measured[0]))
