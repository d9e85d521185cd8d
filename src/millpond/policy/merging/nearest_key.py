"""Merges the values of evicted entries into the entry of the most similar key; keys stay unchanged."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.merge.rules import MergeRule, Weigh
from millpond.policy.merging.protocol import Merged, by_rule
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class MergeIntoNearest:
    """v_c <- (v_c + sum_e w_e v_e) / (1 + sum_e w_e) over the entries e for which c is the most alike.

    u_e = max_c cos(k_e, k_c), w_e = u_e ||v_e|| / (||v_e|| + ||v_c||). Entries with u_e below `threshold` are dropped.
    An entry that stands for m others counts m times. Accumulators are the target's.

    Attributes:
        sinks: first positions that take nothing in.
    """

    threshold: float = 0.0
    sinks: int = 0

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise OptionError(
                f"threshold={self.threshold} must not be negative, or weights would be; above 1 drops all"
            )

    @property
    def rule(self) -> MergeRule:
        """See `SlotMerge`."""
        return MergeRule(Weigh.NORMS, closed=self.sinks, threshold=self.threshold)

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        return by_rule(self.rule, view, keep, value, seed)
