"""Compactor: keys that no others can stand for (Chari and Van Durme, 2025, arXiv:2507.08143)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.policy.leverage import LeverageAndAttention
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect


@method("compactor", paper="arXiv:2507.08143")
def compactor(
    blend: Annotated[float, "weight of the leverage scores beside attention; 0 is attention alone"] = 0.35,
    sketch: Annotated[int, "dimensions that keys are projected to at random first; 0: as they are"] = 48,
    sinks: Annotated[int, "first positions that always stay"] = 8,
    recent: Annotated[int | float, "newest entries that stay: a count (4) or a share of the budget (0.1)"] = 4,
    seed: Annotated[int, "of the random projection"] = 0,
    decode: Annotated[Literal["grow", "evict"], "after the prompt: grow (the paper), or evict at each step"] = "grow",
) -> Policy:
    """Keep the entries whose keys are outliers of their head, and those that are attended to, whatever is asked later.

    s_j = blend * z(l_j) + z(a_j). l_j = x_j^T (X^T X)^-1 x_j is the leverage score of the centred key in a Gaussian
    sketch; a_j = ||v_j|| * attention, averaged over three neighbours; z standardises over the layer's entries.

    Departs from the paper: its attention is not causal, within chunks of the prompt; here it is the model's own, the
    mean that entry j has received from each query since it was written. Leverage is that of the cached keys, after
    RoPE; the paper's is before. Keys of no more dimensions than the sketch are taken exactly. How much a context can
    lose is not calibrated: the budget says it. decode="evict" keeps the budget while decoding: each step ends with a
    plan, and is slow.
    """
    return Policy(
        score=LeverageAndAttention(blend=blend, sketch=sketch),
        protect=Protect(sinks=sinks, recent=recent),
        every_step=decode == "evict",
        seed=seed,
    )
