"""Step merge: the part of a merging policy that `ops.merge_slots` runs after each decoding step, without a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millpond.kernels.decode_rules import DecodeRule, Evict
from millpond.kernels.merge.rules import MergeRule
from millpond.policy.head_allocation import Uniform
from millpond.policy.merging import NewestStay, SlotMerge
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import (
    AccumulatedAttention,
    GlobalAndLocal,
    LastAttention,
    RandomPriority,
    Recency,
    Score,
)


@dataclass(frozen=True, slots=True)
class StepMergePlan:
    """Evictions and merges of a decoding step, and whether they need recent attention."""

    leave: DecodeRule
    rule: MergeRule
    looks_back: bool


def slot_plan(policy: Policy, layer: int) -> StepMergePlan | None:
    """Return the step merge of `policy` for the kernel; None if only a plan can do it.

    The kernel follows a merge that has a rule and a score that each entry has on its own; all heads have one budget.
    """
    if not policy.plans_each_step or policy.shared or type(policy).plan is not Policy.plan:
        return None
    if not isinstance(policy.merge, SlotMerge) or not isinstance(policy.heads, Uniform):
        return None
    assert policy.score is not None, "a policy that plans has a score"
    evict, rule = _order(policy.score), policy.merge.rule
    if evict is None or rule is None:
        return None
    leave = replace(policy.decode_rule(layer), evict=evict)
    return StepMergePlan(leave, replace(rule, masses=policy.mass_bias), isinstance(policy.score, GlobalAndLocal))


def _order(score: Score) -> Evict | None:
    """Return the eviction order of a score that the kernel knows, or None.

    A score of a user's own class is not known.
    """
    if type(score) in (AccumulatedAttention, LastAttention, Recency, RandomPriority):
        return score.evict
    if type(score) is NewestStay:
        return Evict.OLDEST
    return Evict.ACC if type(score) is GlobalAndLocal and score.kernel == 1 else None
