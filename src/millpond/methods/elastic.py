"""Elastic Cache: a prompt merged into anchors (Liu et al., ECCV 2024, arXiv:2407.18121)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.option_ranges import MOST_POSITIONS, POSITIONS, Range
from millpond.policy.merging.nearest_anchor import MergeIntoAnchors
from millpond.policy.protect import Protect
from millpond.policy.variants.anchor_merging import AnchorPolicy, Importance


@method("elastic", paper="arXiv:2407.18121")
def elastic(
    distance: Annotated[
        int,
        "place of the entry that leaves while decoding: below 0 from the end of the merged prompt, else an index",
        Range(-MOST_POSITIONS, MOST_POSITIONS),
    ] = -25,
    grow: Annotated[bool, "a budget in % is one of all tokens so far (the paper), else of the prompt alone"] = True,
    merge: Annotated[Literal["mean", "none"], "average the evicted into their anchor (the paper), or drop it"] = "mean",
    sinks: Annotated[int, "first positions that always stay and take nothing in", POSITIONS] = 1,
    mass_bias: Annotated[bool, "attention counts a merged entry as many times as it stands for"] = False,
    official_code: Annotated[bool, "rank, gather and count as the paper's code does, for comparison"] = False,
) -> AnchorPolicy:
    """Merge a prompt into its most important entries, then let entries go at a fixed place while decoding.

    For instructions, text and images alike: I_j = sum_i mean_h A_hij over all queries and heads of a layer; the best
    are anchors, the same in all heads. Every other entry goes to the anchor nearest in the text, and keys and values
    of an anchor become the mean of its own and theirs. The first `sinks` tokens and the newest stay as they are. When
    the cache outgrows its budget while decoding, the entry at index kept + distance leaves: the older part of the
    prompt stays, what comes after it passes through. Whole keys are needed: not for models that cache latents.

    Departs from the paper: positions are those of the text, and the budget is met exactly; the paper's `ratio` is the
    share that leaves, 100 % less the budget. A later turn is merged like the first, its importance added to what is
    known of the entries before the index. official_code=True takes the order of the scores for ranks, merges the
    entries `sinks` places before those that leave, and keeps one less; the paper's published numbers are such.
    """
    return AnchorPolicy(
        score=Importance(official_code),
        protect=Protect(sinks=sinks, recent=1),
        shared=True,
        merge=None if merge == "none" else MergeIntoAnchors(shift=sinks if official_code else 0),
        mass_bias=mass_bias,
        distance=distance,
        grow=grow,
        official_code=official_code,
    )
