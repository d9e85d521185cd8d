"""Policy whose entries leave by a score that was stored with them, once they are no longer the newest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from millpond.codec.spec import Codec
from millpond.kernels.decode_rules import UNBOUNDED
from millpond.policy.codec_refusal import WAY_OUT
from millpond.policy.eviction_plan import Counts, EvictionPlan, with_rest
from millpond.policy.policy import Policy
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class ThresholdPolicy(Policy):
    """Policy whose text decides how much is kept: a budget is only the most that it may be.

    Plans come at the end of a prompt or turn and, with every_step, whenever `plan_every` entries have come in since.
    So an entry is judged when it has left the newest `protect.recent`, at most `plan_every` - 1 tokens later, and what
    has left does not come back.
    """

    @property
    def needs_budget(self) -> bool:
        """False: the scores decide how much is kept."""
        return False

    @property
    def heads_may_keep_all(self) -> bool:
        return True

    @property
    def plans_below_budget(self) -> bool:
        return True

    def codec_refusal(self, codec: Codec) -> str | None:
        if codec.tiered:
            return f"the scores of this method drop entries for good; {WAY_OUT}"
        return Policy.codec_refusal(self, codec)

    def plan(self, view: View, budget: int, *, between: bool = False) -> EvictionPlan:
        """Choose the entries to keep, at most `budget` a head on average.

        A short later turn stays whole.

        Raises:
            BudgetError: what must be protected does not fit.
            NumericsError: the scores are NaN.
        """
        short = view.turn if self.protect.keeps_short_turn(view.turn, budget) else 0
        newest = self.protect.newest(budget)
        policy = replace(self, protect=replace(self.protect, recent=max(newest, short))) if short > newest else self
        return Policy.plan(policy, view, budget, between=between)

    def caps(self, counts: Counts, held: Counts, budget: int) -> Counts:
        if self.every_step:  # what comes in is counted from here, also where nothing has left
            return counts
        return with_rest(counts, budget) if self.makes_room else np.full_like(counts, UNBOUNDED)
