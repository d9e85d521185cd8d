"""KVMerger: runs of similar neighbours merged into one entry (Wang et al., 2024, arXiv:2407.08454)."""

from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._base import merge_steps
from millpond.methods._options import SinksAdded
from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS, Range
from millpond.policy.allocation.heads import Uniform
from millpond.policy.allocation.score_threshold import AboveThreshold
from millpond.policy.merging.key_runs import GaussianRuns, RunPivots
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect


@method("kvmerger", paper="arXiv:2407.08454")
def kvmerger(
    eps: Annotated[
        float | str,
        "neighbours of a higher cosine are merged (the paper has 0.75); auto: as many as the budget asks",
        Range(-1.0, 10.0),
    ] = "auto",
    sigma: Annotated[float, "width of the Gaussian weights", Range(1e-6, 1e6)] = 5.0,
    recent: Annotated[
        int | float, "newest entries that stay as they are: a share of the budget, or a count", POSITIONS, SHARE
    ] = 0.34,
    top: Annotated[
        float, "share of the budget for the entries of most attention, which stay as they are", SHARE
    ] = 0.24,
    sinks: SinksAdded = 0,
    shared: Annotated[bool, "one set of runs for all heads of a layer, by the mean over them"] = False,
    mass_bias: Annotated[bool, "attention counts a merged entry as often as entries were merged into it"] = False,
    decode: Annotated[Literal["grow", "merge"], "after the prompt: grow (the paper), or keep merging"] = "grow",
    every: Annotated[int, "with decode=merge: entries that gather before they are merged", SOME_POSITIONS] = 1,
) -> Policy:
    """Merge runs of neighbouring entries whose keys are alike into the one of most attention, per KV head.

    Entries j - 1 and j join if cos(k_j-1, k_j) > eps and neither is protected (Algorithm 1); a chain of such pairs is
    a run. Its pivot p is the entry of most accumulated attention, and k* = sum_i w_i k_i, v* = sum_i w_i v_i with
    w_i = g_i / sum g and g_i = exp(-||k_p - k_i||^2 / (2 sigma^2)). The merged entry has the position of its pivot and
    the attention of the whole run. The protected shares are the paper's at a budget of one half (17 % and 12 % of the
    prompt).

    Departs from the paper: with eps="auto" each head has its own threshold, the similarity at which exactly the budget
    is left; where protected entries allow no more joining, the pivots of least attention leave. With a number the
    budget is the most that stays ("100%" leaves eps alone). sigma is 5, the best of the paper's search; its formula
    for sigma refers to itself, and its fixed point keeps the pivot alone. All layers merge (there the first two and
    the last do not), so that the total is the budget. What follows on a run that was merged counts as its neighbour.
    """
    if isinstance(eps, str) and eps != "auto":
        raise OptionError(f"kvmerger: eps={eps!r} must be a number, or auto")
    if decode == "merge" and not isinstance(eps, str):
        raise OptionError("kvmerger: decode=merge keeps a budget, which a fixed eps has not; leave eps=auto")
    pivots = RunPivots(eps=None if isinstance(eps, str) else eps, top=top, shared=shared)
    return Policy(
        score=pivots,
        protect=Protect(sinks=sinks, recent=recent),
        heads=Uniform() if isinstance(eps, str) else AboveThreshold(0.0),
        shared=shared and isinstance(eps, str),
        every_step=decode == "merge",
        merge=GaussianRuns(pivots, sigma),
        mass_bias=mass_bias,
        plan_every=merge_steps("kvmerger", every, decode == "merge"),
    )
