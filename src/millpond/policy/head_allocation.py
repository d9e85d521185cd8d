"""Head budgets of one layer: entries kept per KV head, by fixed shares, by the prompt, or by a score threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.eager.selection import priority
from millpond.policy.layer_allocation import apportion
from millpond.policy.selection import keep_best
from millpond.policy.view import View


class HeadAllocation(Protocol):
    """Split of the budget of a layer over its KV heads."""

    @property
    def every(self) -> int:
        """Decoding steps between two competitions of the heads; 0 if they compete only in plans."""
        ...

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        """Return how many entries no competition takes from a head with `protected` ones.

        int64 of any shape.
        """
        ...

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        """Return entries to keep per head, (H,) int64; their sum is min(H * budget, entries).

        Args:
            value: (H, N) float, higher is kept.
            valid: (H, N) bool, False in columns without an entry.
            pinned: (H, N) bool, entries that are kept before others.
            budget: Entries per head on average.
        """
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Allocation of the same number of entries to every head."""

    every: int = 0

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        return torch.zeros_like(protected) + budget

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        return valid.sum(1).clamp(max=budget)


@dataclass(frozen=True, slots=True)
class Ada:
    """Competition of the heads of a layer in one top-k, each with a guaranteed floor (Ada-KV).

    Feng et al., arXiv:2407.11550. Every head first keeps its protected entries and its best floor(alpha * (budget -
    protected)); the rest of H * budget goes to the highest values of all heads together. This minimises the paper's
    bound on the output error among all allocations that respect the floor.

    With `every`, the heads of a full layer compete again at each such step of decoding: as many entries as came in
    leave, the lowest of all heads together. At the steps between each head evicts its own lowest.

    Departs from the paper: the authors' code blends even shares with the result of a competition without a floor, and
    rounds; `blend` does so too. Of b = budget - protected entries, head h wins b*_h in one top-k of all heads, and
    keeps its protected entries and round((1 - alpha) b*_h + floor(alpha b)) more. The total is then up to H entries
    below the budget. Where the rounding would go above it, or empty a head, the largest remainders fill it exactly.
    """

    alpha: float = 0.2
    every: int = 0
    blend: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise OptionError(f"alpha={self.alpha} must lie in 0..1")
        if self.blend and self.every:
            raise OptionError(f"every={self.every}: budgets that are blended are shared out once; use 0")
        if self.every < 0:
            raise OptionError(f"every={self.every} must not be negative; 0 never lets the heads compete again")

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        return (protected + (self.alpha * (budget - protected).clamp(min=0).double()).long()).clamp(min=1)

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        if self.blend:
            return self._blended(value, valid, pinned, budget)
        n_heads = value.shape[0]
        protected = (pinned & valid).sum(1)
        floor = torch.minimum(self.floor(protected, budget), valid.sum(1))
        secured = keep_best(value, valid, pinned, floor)
        remaining = min(n_heads * budget, int(valid.sum())) - int(secured.sum())
        if remaining <= 0:
            return secured.sum(1)
        others = valid & ~secured
        highest = priority(value, others, torch.zeros_like(pinned)).flatten().topk(remaining).indices
        selected = torch.zeros_like(secured).flatten().index_fill_(0, highest, True).view_as(secured)
        return secured.sum(1) + selected.sum(1)

    def _blended(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        won = Ada(0.0).keep_counts(value, valid, pinned, budget)
        stored, total = valid.sum(1), int(won.sum())
        if total == int(stored.sum()):
            return won
        protected = (pinned & valid).sum(1)
        even = (self.alpha * (budget - protected).clamp(min=0).double()).long()
        shares = (1 - self.alpha) * (won - protected).double() + even
        counts = torch.minimum(protected + shares.round().long(), stored)
        if int(counts.min()) > 0 and int(counts.sum()) <= total:
            return counts
        min_protected = max(1, int(protected.min()))
        return counts.new_tensor(apportion((protected + shares).tolist(), total, min_protected, stored.tolist()))


#: A key that no entry has: it leaves after all others.
_LAST = torch.iinfo(torch.int64).max


def lowest_scored(value: Tensor, positions: Tensor, free: Tensor, spare: Tensor, n: int) -> Tensor:
    """Return the `n` entries of each layer with the lowest values of all its heads together.

    Ties leave oldest first.

    Args:
        value: (S, H, N) float32.
        positions: (S, H, N) int32.
        free: (S, H, N) bool, entries that may leave.
        spare: (S, H) int64, how many entries each head can do without.
        n: Entries to take from each layer.

    Returns:
        (S, H, N) bool, fewer than n where there are no more to spare.
    """
    bits = (value.float() + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    key = ((ascending.long() << 32) + positions.long()).masked_fill(~free, _LAST)
    low, column = key.topk(min(n, key.shape[-1]), dim=-1, largest=False)
    rank = torch.arange(low.shape[-1], device=low.device)
    low = low.masked_fill(rank >= spare[..., None], _LAST)
    if low.shape[1] == 1:  # sorted already
        return torch.zeros_like(free).scatter_(-1, column, low < _LAST)
    first = low.flatten(1).argsort(dim=1, stable=True)[:, :n]
    selected = torch.zeros_like(low, dtype=torch.bool).flatten(1).scatter_(1, first, True).view_as(low)
    return torch.zeros_like(free).scatter_(-1, column, selected & (low < _LAST))


class DecidedHeads(HeadAllocation, Protocol):
    """Allocation for the heads of one view."""

    @property
    def grows(self) -> Tensor:
        """(H,) bool: the heads that keep everything decoded until the next plan."""
        ...


@runtime_checkable
class PromptHeadAllocation(Protocol):
    """Allocation that depends on the layer or on the prompt.

    Its heads never compete while decoding.
    """

    @property
    def grows(self) -> bool:
        """Whether some heads keep everything decoded until the next plan."""
        ...

    def check(self, n_layers: int) -> None:
        """Check that the allocation fits a model of this many layers.

        Raises:
            OptionError: it does not fit a model of this many layers.
        """
        ...

    def decide(self, view: View) -> DecidedHeads:
        """Return the allocation for the heads of `view`."""
        ...


@dataclass(frozen=True, slots=True)
class AboveThreshold:
    """Allocation that keeps every entry of at least the threshold and the protected ones.

    No head is left empty. Where that is more than the budget, the highest values of all heads together stay, and the
    total is the budget.
    """

    threshold: float
    every: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise OptionError(f"threshold={self.threshold} must be a finite number")

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        return protected.clamp(min=1)

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        above = valid & (pinned | (value >= self.threshold))
        counts = torch.minimum(above.sum(1).clamp(min=1), valid.sum(1))
        if int(counts.sum()) <= len(value) * budget:
            return counts
        return Ada(alpha=0.0).keep_counts(value, valid, pinned, budget)
