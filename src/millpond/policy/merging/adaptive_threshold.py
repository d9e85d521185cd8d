"""Merges evicted entries that are similar enough to a kept one; the threshold follows the similarities seen (D2O)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.merge.rules import MergeRule, Weigh
from millpond.policy.merging.protocol import Merged, by_rule
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class MergeAboveThreshold:
    """An entry e that leaves is merged into c, the most alike, if u_e = max_c cos(k_e, k_c) >= tau, else dropped.

    tau is the mean of u at the first merge of a sequence in a layer; later tau <- rate * mean(u) + (1 - rate) * tau.
    Keys and values of c become w_c x_c + sum_e w_e x_e with w_e = exp(u_e) / Z, w_c = e / Z, Z = e + sum exp(u_e).
    An entry that stands for m others counts m times. Accumulators are those of c.

    Attributes:
        rate: of the moving average. sinks: first positions that take nothing in.
        shrinking: x_c <- (x_c + sum_e u_e x_e) / (1 + their number) in place of the convex weights.
    """

    rate: float = 0.7
    sinks: int = 0
    shrinking: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise OptionError(f"rate={self.rate} of the moving average must lie in 0..1, and not be 0")

    @property
    def rule(self) -> MergeRule:
        """See `SlotMerge`."""
        return MergeRule(Weigh.COUNT if self.shrinking else Weigh.EXP, closed=self.sinks, rate=self.rate)

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        return by_rule(self.rule, view, keep, value, seed)
