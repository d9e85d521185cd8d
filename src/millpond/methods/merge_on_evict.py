"""Merge on evict: evicted entries of any other method merged into kept ones (after MergingPress of kvpress)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.merge.rules import MergeRule, Weigh
from millpond.methods import method
from millpond.methods._base import based_on, merge_steps
from millpond.option_ranges import SOME_POSITIONS, Range
from millpond.policy.merging import Merged, by_rule
from millpond.policy.policy import Policy
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class MergeIntoNearest:
    """v_c <- (v_c + sum_e w_e v_e) / (1 + sum_e w_e) over the entries e most alike to c.

    u_e = max_c cos(k_e, k_c), w_e = u_e ||v_e|| / (||v_e|| + ||v_c||). Entries with u_e below `threshold` are dropped.
    An entry that stands for m others counts m times. Accumulators are the target's.

    Attributes:
        sinks: First positions that take nothing in.
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


@method("merge_on_evict")
def merge_on_evict(
    score: Annotated[str, "the method that chooses evicted entries: snapkv, h2o, ada/score=snapkv, ..."] = "snapkv",
    threshold: Annotated[
        float, "entries whose key has a smaller cosine with every kept one are dropped; 0 or more", Range(0.0, 10.0)
    ] = 0.0,
    mass_bias: Annotated[bool, "attention counts a merged entry as often as entries were merged into it"] = False,
    every: Annotated[
        int, "where the method evicts while decoding: entries that gather before they are merged", SOME_POSITIONS
    ] = 1,
) -> Policy:
    """Merge the values of evicted entries into the kept entries with the most similar keys.

    Keys do not change.

    Entry e goes to c(e) = argmax_c cos(k_e, k_c), per KV head. With u_e the cosine and
    w_e = u_e ||v_e|| / (||v_e|| + ||v_c||), v_c <- (v_c + sum_e w_e v_e) / (1 + sum_e w_e). What stays, and where, is
    what `score` keeps, which continues from the scores of the kept entries. With mass_bias an entry that stands for m
    weighs m times, and log m is added to its logit: merging equal entries is then without loss.

    Departs from the code that it follows: merging goes on while decoding, where `score` evicts then (with `every` up to
    every - 1 entries lie beyond the budget; a score that no kernel continues, as one pooled over a window or shared by
    the heads, makes each such step a plan, and slow). The sinks that `score` protects take nothing in.
    """
    base = based_on("merge_on_evict", score)
    if base.merge is not None:
        raise OptionError(f"merge_on_evict: score={score!r} merges already; name one that drops")
    return replace(
        base,
        merge=MergeIntoNearest(threshold, base.protect.sinks),
        mass_bias=mass_bias,
        plan_every=merge_steps("merge_on_evict", every, base.every_step),
    )
