"""KeyDiff: keys unlike the mean key are kept (Park et al., 2025, arXiv:2504.15364)."""

from millpond.methods import method
from millpond.methods._base import across_layers
from millpond.methods._options import Across, Chunk, ChunkedPrefill, Grow, Recent, SinksAdded
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.key_geometry import KeyDifference


@method("keydiff", paper="arXiv:2504.15364")
def keydiff(
    recent: Recent = 0,
    sinks: SinksAdded = 0,
    prefill: ChunkedPrefill = "once",
    chunk: Chunk = 256,
    decode: Grow = "grow",
    across: Across = False,
) -> Policy:
    """Keep the entries whose keys point away from the mean direction of their head.

    s_j = - cos(k_j, m) with m = mean_i k_i / ||k_i|| over the entries of the head: the ranking by the sum of cosines
    with all other keys, in linear time. No attention is observed; keys are compared after RoPE.

    Departs from the paper: a prompt is compressed once, at its end; prefill="chunks" compresses it chunk by chunk, as
    the paper does. decode="evict" continues at each step, the paper's rule in blocks of one; each ends with a plan, and
    is slow.
    """
    policy = Policy(
        score=KeyDifference(),
        protect=Protect(sinks=sinks, recent=recent),
        prefill=prefill,
        chunk=chunk,
        every_step=decode == "evict",
        once=decode == "once",
    )
    return across_layers("keydiff", policy, across)
