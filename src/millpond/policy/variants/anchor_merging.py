"""Policies that merge a prompt into anchors, then evict at a fixed place while decoding (Elastic Cache)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import DecodeRule, Evict, Signal
from millpond.policy.merging.protocol import Merged, own_scores
from millpond.policy.policy import EvictionPlan, Policy
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View

#: Of an entry that stays while decoding at the least; those that take their turn to leave have 0.
_STANDING = 1e-30


@dataclass(frozen=True, slots=True)
class Importance:
    """s_j = sum_i mean_h A_hij over all query heads h of the layer and all queries i of the prompt.

    With `official_code` the best are those at whose place the order of the scores names a late place: it takes the
    entries of torch.argsort for ranks.
    """

    official_code: bool = False
    queries: Queries = "all"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict = Evict.ACC

    def score(self, view: View, seed: int) -> Tensor:
        value = own_scores(view).mean(0, keepdim=True).expand(len(view.positions), -1)
        if not self.official_code:
            return value
        free = view.free[0]
        order = value[0, free].argsort(stable=True)
        mistaken = torch.zeros_like(value[0]).masked_scatter(free, order.to(value))
        # NaN stays NaN, for the plan to report
        return (0 * value[0] + mistaken).expand_as(value)


@dataclass(frozen=True, slots=True)
class AnchorPolicy(Policy):
    """Plans merge; while decoding the entry at a fixed index leaves, counted in the order of positions.

    What lies before the index stays, what lies after it leaves in turn, oldest first: entries before it keep their
    score, which is above 0, entries after it and new ones have 0, and the decode kernel takes the lowest and oldest.

    Attributes:
        distance: the index if above 0; below 0 it is counted from the end of what a plan keeps.
        grow: a budget that is a share is one of all tokens seen, and grows while decoding.
        official_code: keep one entry less, as the paper's code does.
    """

    distance: int = -25
    grow: bool = True
    official_code: bool = False

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        if not isinstance(self.score, Importance) or not self.shared or self.needs_all_layers:
            raise OptionError("a method that lets entries go at a fixed place cannot be the score of another method")
        if self.distance == 0:
            raise OptionError("distance=0 would let each new token go at once; write -1 or below, or an index above 0")
        if self.official_code and self.mass_bias:
            raise OptionError("official_code merges kept entries, so their mass is undefined")

    @property
    def plans_each_step(self) -> bool:
        """Only prompts are merged."""
        return False

    @property
    def grows(self) -> bool:
        return self.grow

    def decode_rule(self, layer: int) -> DecodeRule:
        """The lowest stored score leaves; all heads hold the same, so each may read its own."""
        return replace(Policy.decode_rule(self, layer), evict=Evict.ACC, shared=False)

    def plan(self, view: View, budget: int, *, between: bool = False) -> EvictionPlan:
        """Choose the anchors of `view` under `budget` entries per head, merge the others into them.

        Raises:
            BudgetError: what must be protected does not fit.
            NumericsError: the scores are NaN.
        """
        less = int(self.official_code and bool((view.counts > budget).any()))
        plan = Policy.plan(self, view, budget - less, between=between)
        index = self._index(int(plan.keep[0].sum()) + less)
        behind = plan.keep.cumsum(1) > index
        scores = own_scores(view).clamp(min=_STANDING).masked_fill(behind, 0)
        merged = plan.merged or Merged(view.keys, view.values, view.masses.log().float(), scores)
        return replace(plan, caps=torch.full_like(plan.caps, budget), merged=replace(merged, scores=scores))

    def _index(self, kept: int) -> int:
        """The place of the entry that leaves, of `kept` at the end of the prompt."""
        wanted = self.distance if self.distance > 0 else kept + self.distance
        return max(0, min(wanted, kept - 1))
