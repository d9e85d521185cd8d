"""KeyDiff: keys unlike the mean key are kept (Park et al., 2025, arXiv:2504.15364)."""

from millpond.methods import method
from millpond.methods._options import Grow, Recent, SinksAdded
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.key_geometry import KeyDifference


@method("keydiff", paper="arXiv:2504.15364")
def keydiff(recent: Recent = 0, sinks: SinksAdded = 0, decode: Grow = "grow") -> Policy:
    """Keep the entries whose keys point away from the mean direction of their head.

    s_j = - cos(k_j, m) with m = mean_i k_i / ||k_i|| over the entries of the head: the ranking by the sum of cosines
    with all other keys, in linear time. No attention is observed; keys are compared after RoPE.

    A prompt in chunks is compressed chunk by chunk, as in the paper, when the cache plans between chunks.
    decode="evict" continues at each step, the paper's rule in blocks of one; each ends with a plan, and is slow.
    """
    return Policy(
        score=KeyDifference(),
        protect=Protect(sinks=sinks, recent=recent),
        every_step=decode == "evict",
        once=decode == "once",
    )
