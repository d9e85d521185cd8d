"""Compactor: keys that no others can represent (Chari and Van Durme, 2025, arXiv:2507.08143)."""

from typing import Annotated

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._options import GrowInPaper, Sinks
from millpond.option_ranges import POSITIONS, SEEDS, SHARE, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.leverage import LeverageAndAttention


@method("compactor", paper="arXiv:2507.08143")
def compactor(
    blend: Annotated[
        float | str,
        "weight of the leverage scores; 0 is attention alone; auto: the evicted share of the text",
        Range(0.0, 1e6),
    ] = "auto",
    sketch: Annotated[
        int, "dimensions that keys are projected to at random first; 0: as they are", Range(0, 4096)
    ] = 48,
    sinks: Sinks = 8,
    recent: Annotated[
        int | float, "newest entries that stay: a count (4) or a share of the budget (0.1)", POSITIONS, SHARE
    ] = 4,
    seed: Annotated[int, "of the random projection", SEEDS] = 0,
    decode: GrowInPaper = "grow",
) -> Policy:
    """Keep the entries whose keys are outliers of their head, and attended ones, whatever the later question is.

    s_j = blend * z(l_j) + z(a_j). l_j = x_j^T (X^T X)^-1 x_j is the leverage score of the centred key in a Gaussian
    sketch; a_j = ||v_j|| * attention, averaged over three neighbours; z standardises over the layer's entries. By
    itself blend is 1 - budget / length of the text: the less stays, the more it counts that no other key says the same.

    Departs from the paper: its attention is not causal, within chunks of the prompt; here it is the model's own, the
    mean that entry j has received from each query since it was written. Leverage is that of the cached keys, after
    RoPE; the paper's is before. Keys of no more dimensions than the sketch are taken exactly. The blend follows the
    budget, as in kvpress. How much a context can lose is not calibrated: the budget says it. decode="evict" keeps the
    budget while decoding: each step ends with a plan, and is slow.
    """
    if isinstance(blend, str) and blend != "auto":
        raise OptionError(f"compactor: blend={blend!r} must be a number, or auto")
    return Policy(
        score=LeverageAndAttention(blend=None if isinstance(blend, str) else blend, sketch=sketch),
        protect=Protect(sinks=sinks, recent=recent),
        every_step=decode == "evict",
        once=decode == "once",
        seed=seed,
    )
