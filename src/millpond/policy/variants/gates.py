"""Policies whose trained gates say of each entry whether its KV head keeps it (Attention-Gate)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from millpond.codec.spec import Codec
from millpond.errors import OptionError
from millpond.kernels.decode_rules import UNBOUNDED
from millpond.policy.allocation.gated_heads import GatedHeads
from millpond.policy.allocation.layers import EvenLayers
from millpond.policy.needs.declared import Needs
from millpond.policy.policy import WAY_OUT, EvictionPlan, Policy, with_rest
from millpond.policy.retaining.gates import Gates
from millpond.policy.scores.gated import FindGates, Gated
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class GatePolicy(Policy):
    """Entries are flagged when they are written; plans drop those without a flag that are no longer among the newest.

    Plans come at the end of a prompt or turn and, with every_step, whenever `plan_every` entries have come in since.
    """

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        alone = isinstance(self.heads, GatedHeads) and isinstance(self.layers, EvenLayers) and not self.shared
        if not (alone and self.merge is None and isinstance(self.score, Gated)):
            raise OptionError("a method whose gates say what stays cannot be the score of another method")
        if self.prefill != "once":
            raise OptionError(f'prefill={self.prefill!r}: flags are acted on when a prompt ends; give prefill="once"')

    @property
    def gates(self) -> Gates | None:
        """The networks; None until `with_gates` has found those of a model."""
        return self.score.gates if isinstance(self.score, Gated) else None

    @property
    def needs(self) -> Needs:
        looks_ahead = self.gates is not None and not self.gates.causal
        return Needs(whole_prompt=looks_ahead, uncut=looks_ahead)

    @property
    def scores_entries(self) -> bool:
        return True

    @property
    def needs_budget(self) -> bool:
        """The gates say how much is kept."""
        return False

    @property
    def heads_may_keep_all(self) -> bool:
        return True

    def with_gates(self, find: FindGates) -> GatePolicy:
        assert isinstance(self.score, Gated), "checked when the policy was made"
        return replace(self, score=replace(self.score, gates=find(self.score.gates)))

    def codec_refusal(self, codec: Codec) -> str | None:
        if codec.tiered:
            return f"the gates of this method drop entries for good; {WAY_OUT}"
        return Policy.codec_refusal(self, codec)

    def plan(self, view: View, budget: int, *, between: bool = False) -> EvictionPlan:
        """Choose what stays, under at most `budget` entries a head on average; a short later turn stays whole.

        Raises:
            BudgetError: what must be protected does not fit.
            NumericsError: the probabilities are NaN.
        """
        short = view.turn if self.protect.keeps_short_turn(view.turn, budget) else 0
        newest = self.protect.newest(budget)
        whole = replace(self, protect=replace(self.protect, recent=max(newest, short))) if short > newest else self
        return Policy.plan(whole, view, budget, between=between)

    def _caps(self, counts: Tensor, view: View, budget: int) -> Tensor:
        if self.every_step:  # what comes in is counted from here, also where nothing has left
            return counts
        return with_rest(counts, budget) if self.makes_room else counts.new_full(counts.shape, UNBOUNDED)
