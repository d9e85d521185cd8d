"""CaM: cache merging (Zhang et al., ICML 2024)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.methods._options import Sinks
from millpond.option_ranges import POSITIONS, SEEDS, SOME_POSITIONS
from millpond.policy.merging import NewestStay, SpreadOverNext
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention, LastAttention, Score


@method("cam", paper="ICML 2024")
def cam(
    targets: Annotated[
        int, "entries after the evicted one, which share its value; 0: as many as are kept", POSITIONS
    ] = 16,
    attention: Annotated[
        Literal["sum", "mean", "last"], "what counts as attention: from all queries, their mean, or from the newest"
    ] = "sum",
    over: Annotated[
        Literal["targets", "recent", "max"],
        "what it is divided by: the mean of the targets, the mean after the sinks, or the largest of all",
    ] = "targets",
    draw: Annotated[bool, "merge at random (the paper); else by expectation"] = False,
    sinks: Sinks = 4,
    prefill: Annotated[Literal["once", "greedy"], "merge once at the prompt's end, or at each of its tokens"] = "once",
    seed: Annotated[int, "of the draws: the same whatever the batch", SEEDS] = 0,
    mass_bias: Annotated[bool, "values become means by mass, and attention counts their mass"] = False,
    every: Annotated[int, "while decoding: entries that gather before they are merged", SOME_POSITIONS] = 1,
) -> Policy:
    """Add the value of an entry that leaves the recent window to the entries after it.

    Sinks and newest entries stay.

    V_j <- V_j + M_i V_i / n for the n entries j right behind i, M_i ~ Bernoulli(p_i) with
    p_i = clamp(a_i / mean_j a_j, 0, 1); keys stay as they are. Where attention keeps its proportions, the sum of
    attention times value that a query collects is then right in expectation, as long as p < 1.

    Departs from the paper: p_i takes the place of the draw unless draw=True; draws depend on seed, layer, head and
    position. With mass_bias the mass p_i goes along, so that the softmax's denominator is right as well. Of the three
    variants in the official code the default is the one for streaming: (targets=16, attention=sum, over=targets).
    The others are (32, last, recent) and (0, mean, max). A value is merged when its entry leaves and is not seen twice
    in between, and is divided by the targets that there are. At the end of a prompt entries leave in the order of the
    text and pass on what they were given, by the attention of the whole prompt; prefill="greedy" has each leave when
    the window has passed it, which reads the prompt token by token.
    """
    kinds: dict[str, Score] = {
        "sum": AccumulatedAttention(),
        "mean": AccumulatedAttention(average=True),
        "last": LastAttention(),
    }
    return Policy(
        score=NewestStay(kinds[attention]),
        protect=Protect(sinks=sinks, recent=1),
        prefill=prefill,
        merge=SpreadOverNext(kinds[attention], targets, over, draw, mass_bias, sinks),
        mass_bias=mass_bias,
        plan_every=every,
        seed=seed,
    )
