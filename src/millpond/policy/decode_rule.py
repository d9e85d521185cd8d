"""Rules by which the decode kernel evicts where a method itself would grow, or a window hides entries."""

from __future__ import annotations

from dataclasses import replace

from millpond.kernels.decode_rules import DecodeRule, Evict, Signal
from millpond.policy.head_allocation import HeadAllocation, PromptHeadAllocation
from millpond.policy.scores.attention import Score


def room_order(score: Score, heads: HeadAllocation | PromptHeadAllocation, *, gathers: bool) -> Evict:
    """Return the order in which entries leave full heads of a policy that would let them grow.

    It is the score's own order if that needs no attention, else that of the scores of the last plan.

    Args:
        score: Score of the policy.
        heads: Split of the budget over the heads.
        gathers: Whether the scores stored with the entries go into later plans.
    """
    evict = score.evict
    if evict is None or isinstance(heads, PromptHeadAllocation) or (evict.by_score and not gathers):
        return Evict.ACC
    return evict


def on_sliding_layer(rule: DecodeRule) -> DecodeRule:
    """Return the rule for a layer with a sliding window.

    Heads that grow elsewhere drop the oldest entries there, which nothing sees.
    """
    if rule.evict is not Evict.NEVER:
        return rule
    return replace(rule, evict=Evict.OLDEST, signal=Signal.NONE, sinks=0)
