"""Merges important evicted entries into the kept entry of most similar key and value, and drops the others (EMS)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.merge.rules import MergeRule, Weigh
from millpond.policy.merging.protocol import Merged, by_rule
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class MergeByImportance:
    """Entries that leave and matter are merged into their class, a kept entry, or into the class of zero and dropped.

    Of a head's score, the best entries that make up `cover` of the sum matter, but no more than `most` times as many
    as are kept. R(x, c) = cos(k_x, k_c) cos(v_x, v_c) if both are positive, else -1; x belongs to the kept c of
    highest R if that is above `threshold`, else to zero. Weights are the scores, over c and its members: values
    become their mean, keys the mean direction times the mean length. Accumulators are added up.

    Attributes:
        sinks: first positions that take nothing in.
    """

    threshold: float = 0.6
    cover: float = 0.95
    most: float = 4.0
    sinks: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cover <= 1:
            raise OptionError(f"cover={self.cover} is a share of the score, 0 to 1")
        if not 0 <= self.most < math.inf:
            raise OptionError(f"most={self.most} must not be negative")
        if not self.threshold >= -1:
            raise OptionError(f"threshold={self.threshold} must be at least -1")

    @property
    def rule(self) -> MergeRule:
        """See `SlotMerge`."""
        return MergeRule(Weigh.SCORE, closed=self.sinks, threshold=self.threshold, cover=self.cover, most=self.most)

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        return by_rule(self.rule, view, keep, value, seed)
