"""Elastic Cache: a prompt merged into anchors (Liu et al., ECCV 2024, arXiv:2407.18121)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import DecodeRule, Evict, Signal
from millpond.kernels.merge.rules import Links, mean
from millpond.methods import method
from millpond.option_ranges import MAX_POSITIONS, POSITIONS, Range
from millpond.policy.eviction_plan import EvictionPlan
from millpond.policy.merging import Merged, joined_masses, own_scores
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.view import PARTS, View


@dataclass(frozen=True, slots=True)
class MergeIntoAnchors:
    """k_a <- mean of k_a and the k_e over entries e whose nearest anchor is a; v_a likewise.

    Anchors are the entries that stay by their score, not by protection. Near is near in the text, ties to the left.
    An entry that stands for m others counts m times. Accumulators are the anchor's. Without an anchor all are dropped.

    Attributes:
        shift: Columns by which the merged entries lie before the evicted ones; the paper's code has one per sink.
    """

    shift: int = 0

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        links = self.links(view, keep)
        keys, values = (mean(view.stored(part), view.masses, view.masses, links) for part in PARTS)
        return Merged(keys, values, joined_masses(view, links), own_scores(view))

    def links(self, view: View, keep: Tensor) -> Links:
        """Return which entries are merged, and into which anchor."""
        anchors = keep & view.free
        into, reachable = nearest_in_text(view.positions, anchors)
        taken = (view.valid & ~keep).roll(-self.shift, 1)
        return Links(into, taken & reachable)


def nearest_in_text(positions: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Return each entry's nearest anchor, a column (H, N) int64, and whether one exists.

    An anchor's is its own. positions: (H, N), ascending; anchors: (H, N) bool.
    """
    n = positions.shape[1]
    column = torch.arange(n, device=positions.device).expand_as(positions)
    anchor_before = column.masked_fill(~anchors, -1).cummax(1).values
    right = column.masked_fill(~anchors, n).flip(1).cummin(1).values.flip(1)
    unreachable = torch.iinfo(torch.int64).max
    text_positions = positions.long()
    to_left = (text_positions - text_positions.gather(1, anchor_before.clamp(min=0))).masked_fill(
        anchor_before < 0, unreachable
    )
    to_right = (text_positions.gather(1, right.clamp(max=n - 1)) - text_positions).masked_fill(right == n, unreachable)
    into = torch.where(to_left <= to_right, anchor_before, right)
    reachable = (anchor_before >= 0) | (right < n)
    return torch.where(reachable, into, column), reachable


#: Of an entry that stays while decoding at the least; those that take their turn to leave have 0.
_STANDING = 1e-30


@dataclass(frozen=True, slots=True)
class Importance:
    """s_j = sum_i mean_h A_hij over all query heads h of the layer and prompt queries i.

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
    """Policy whose plans merge; while decoding the entry at a fixed index leaves.

    The index is counted in the order of positions.

    Attributes:
        distance: The index if above 0; below 0 it is counted from the end of what a plan keeps.
        grow: A budget that is a share is one of all tokens seen, and grows while decoding.
        official_code: Keep one entry less, as the paper's code does.
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
        """Return the rule by which the lowest stored score leaves.

        All heads hold the same scores, so each may read its own.
        """
        return replace(Policy.decode_rule(self, layer), evict=Evict.ACC, shared=False)

    def plan(self, view: View, budget: int, *, between: bool = False) -> EvictionPlan:
        """Choose the anchors of `view` under `budget` entries per head, and merge the others.

        Raises:
            BudgetError: what must be protected does not fit.
            NumericsError: the scores are NaN.
        """
        less = int(self.official_code and bool((view.counts > budget).any()))
        plan = Policy.plan(self, view, budget - less, between=between)
        index = self._index(int(plan.keep[0].sum()) + less)
        after = plan.keep.cumsum(1) > index
        scores = own_scores(view).clamp(min=_STANDING).masked_fill(after, 0)
        merged = plan.merged or Merged(view.keys, view.values, view.masses.log().float(), scores)
        return replace(plan, caps=np.full_like(plan.caps, budget), merged=replace(merged, scores=scores))

    def _index(self, n_kept: int) -> int:
        """Return the place of the entry that leaves, of `kept` at the end of the prompt."""
        index = self.distance if self.distance > 0 else n_kept + self.distance
        return max(0, min(index, n_kept - 1))


@method("elastic", paper="arXiv:2407.18121")
def elastic(
    distance: Annotated[
        int,
        "place of the entry that leaves while decoding: below 0 from the end of the merged prompt, else an index",
        Range(-MAX_POSITIONS, MAX_POSITIONS),
    ] = -25,
    grow: Annotated[bool, "a budget in % is one of all tokens so far (the paper), else of the prompt alone"] = True,
    merge: Annotated[Literal["mean", "none"], "average the evicted into their anchor (the paper), or drop it"] = "mean",
    sinks: Annotated[int, "first positions that always stay and take nothing in", POSITIONS] = 1,
    mass_bias: Annotated[bool, "attention counts a merged entry as many times as it stands for"] = False,
    official_code: Annotated[bool, "rank, gather and count as the paper's code does, for comparison"] = False,
) -> AnchorPolicy:
    """Merge a prompt into its most important entries; evict at a fixed place while decoding.

    For instructions, text and images alike: I_j = sum_i mean_h A_hij over all queries and heads of a layer; the best
    are anchors, the same in all heads. Every other entry goes to the anchor nearest in the text, and keys and values
    of an anchor become the mean of its own and theirs. The first `sinks` tokens and the newest stay as they are. When
    the cache outgrows its budget while decoding, the entry at index kept + distance leaves: the older part of the
    prompt stays, what comes after it passes through. Whole keys are needed: not for models that cache latents.

    Departs from the paper: positions are those of the text, and the budget is met exactly; the paper's `ratio` is the
    share that leaves, 100 % less the budget. A later turn is merged like the first, its importance added to what is
    known of the entries before the index. official_code=True takes the order of the scores for ranks, merges the
    entries `sinks` places before those that leave, and keeps one less; the paper's published numbers are such.
    """
    return AnchorPolicy(
        score=Importance(official_code),
        protect=Protect(sinks=sinks, recent=1),
        shared=True,
        merge=None if merge == "none" else MergeIntoAnchors(shift=sinks if official_code else 0),
        mass_bias=mass_bias,
        distance=distance,
        grow=grow,
        official_code=official_code,
    )
