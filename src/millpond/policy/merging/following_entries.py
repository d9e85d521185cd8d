"""Spreads the values of evicted entries over the entries that follow them (CaM)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict
from millpond.kernels.merge.rules import MergeRule, Over, Weigh
from millpond.policy.merging.protocol import Merged, by_rule
from millpond.policy.scores.attention import AccumulatedAttention, LastAttention, Score
from millpond.policy.scores.wrapped import WrappedScore
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class NewestStay(WrappedScore):
    """s_j = position of j; the attention of `base` is gathered for what merges by it."""

    base: Score = field(default_factory=AccumulatedAttention)
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True, slots=True)
class SpreadOverNext:
    """V_j += p_i V_i / n for each j of the n entries right behind entry i, at most `targets`; keys stay.

    Entries are evicted one after another, the oldest first; a later one passes on what it received.
    p_i = clamp(a_i / A, 0, 1), a the attention of `base` and A over what `over` says: the mean of the targets'
    attention, the mean of the kept entries after the sinks, or the largest of all kept entries. With `draw` a value
    is merged whole with probability p_i, or not at all: the draw is a hash of seed, layer, head and position. With
    `bias` n masses of p_i / n go with the values, and V_j is the mean by mass.

    Attributes:
        targets: 0 for as many as stay.
    """

    base: Score
    targets: int = 16
    over: Literal["targets", "recent", "max"] = "targets"
    draw: bool = False
    bias: bool = False
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.targets < 0:
            raise OptionError(f"targets={self.targets} must not be negative; 0 takes all kept entries behind")

    @property
    def rule(self) -> MergeRule | None:
        """See `SlotMerge`: where the accumulators are the attention of `base`."""
        return self._rule if type(self.base) in (AccumulatedAttention, LastAttention) else None

    @property
    def _rule(self) -> MergeRule:
        average = isinstance(self.base, AccumulatedAttention) and self.base.average
        return MergeRule(
            Weigh.CHANCE,
            closed=self.sinks,
            targets=self.targets,
            over=Over[self.over.upper()],
            average=average,
            draw=self.draw,
            bias=self.bias,
            masses=self.bias,
        )

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        return by_rule(self._rule, view, keep, self.base.score(view, seed), seed)
