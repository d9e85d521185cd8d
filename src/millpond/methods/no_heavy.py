"""no_heavy: the ablation that evicts the heavy hitters and keeps the rest (H2O, section 3)."""

from millpond.methods import method
from millpond.methods._options import GroupReduce, Recent, Sinks
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import LeastAttention


@method("no_heavy", paper="arXiv:2306.14048")
def no_heavy(recent: Recent = 0.5, sinks: Sinks = 0, reduce: GroupReduce = "mean") -> Policy:
    """Evict the entries with the most attention: H2O without its heavy hitters.

    H2O turned round: s_j = - sum_i A_ij, and the recent window as there. A budget of 95 % evicts just the 5 % that
    are heaviest. For study.
    """
    return Policy(score=LeastAttention(), protect=Protect(sinks=sinks, recent=recent), reduce=reduce)
