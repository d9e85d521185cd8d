"""Policies of methods for texts longer than the model's context."""

from __future__ import annotations

from dataclasses import replace

from millpond.errors import OptionError
from millpond.policy.needs import NOTHING
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import AccumulatedAttention, LastAttention, LeastAttention, Recency

#: Scores that say the same of entries whose positions have changed in the same order.
_SCORES = (AccumulatedAttention, LastAttention, LeastAttention, Recency)
WAY_OUT = "use h2o, tova, streaming or window, or overflow='refuse'"


def rolling_policy(policy: Policy, method: str, coded: bool) -> Policy:
    """Return the policy with gaps between entries closed at the end of the model's context.

    Args:
        policy: Policy of the method.
        method: Name of the method, for errors.
        coded: Whether some entries are stored as codes.

    Returns:
        The same, but that gaps close only there: except for sinks that follow the newest entries at each step, where
        all keys are stored as they are.

    Raises:
        OptionError: positions of its entries cannot change; the message says why and names methods where they can.
    """
    reason = _refusal(policy)
    if reason is not None:
        raise OptionError(f"method {method!r} with overflow='rolling': {reason}; {WAY_OUT}")
    follows = isinstance(policy.score, Recency) and not coded
    return policy if follows else replace(policy, positions="absolute")


def _refusal(policy: Policy) -> str | None:
    """Return why positions of stored entries cannot change under a policy; None if they can."""
    if policy.keeps_all:
        return "it evicts nothing, and a text without end needs a cache that stays at its budget"
    if policy.merge is not None:
        return "a merged key stands for several positions, so it cannot be turned to another one"
    if not policy.every_step:
        return "what is decoded stays in the cache, which a text without end fills (decode='evict' where it has that)"
    average = isinstance(policy.score, AccumulatedAttention) and policy.score.average
    if average or type(policy.score) not in _SCORES or policy.plans_each_step:
        return "its scores depend on how far apart entries lie in the text, or are those of a plan"
    if policy.needs != NOTHING or not policy.heads_are_uniform or policy.needs_all_layers:
        return "its plan depends on the whole prompt, which need not fit into the context"
    if policy.prefill == "chunks":
        return "it counts chunks from the beginning of the text"
    return None
