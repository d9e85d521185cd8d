"""CriticalKV: attention weighted by output effect of values (Feng et al., 2025, arXiv:2502.03805)."""

from dataclasses import replace
from typing import Annotated

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.methods._options import GrowOrEvict
from millpond.option_ranges import SHARE, Range
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import AccumulatedAttention, LastAttention, WindowAttention
from millpond.policy.scores.critical_values import CriticalValues


@method("criticalkv", paper="arXiv:2502.03805")
def criticalkv(
    score: Annotated[str, "the method whose attention and protection are used: snapkv, h2o/sinks=0, ..."] = "snapkv",
    first: Annotated[float, "share of the free budget that attention alone fills first, 0 to 1", SHARE] = 0.5,
    eps: Annotated[float, "added to the attention in the second stage", Range(0.0, 1e6)] = 1e-4,
    numbers: Annotated[
        int, "numbers of the output, evenly spread, that a norm is summed over; 0 for all", Range(0, 2**20)
    ] = 256,
    decode: GrowOrEvict = "grow",
) -> Policy:
    """Keep what is attended to, then what is attended to and changes the layer's output most.

    First stage: the entries of highest attention a_j, `first` of the budget after the protected ones.
    Second stage: the highest (a_j + eps) * ||v_j W_O||_1 among the rest (Algorithm 1), which lowers the paper's bound
    on the change of the output. W_O is the part of the output projection of each query head, averaged over a group.

    Departs from the paper: under head budgets (ada, with this as its score) heads compete by the two-stage number and
    not by attention. The norm takes at most `numbers` numbers of an output. decode="evict" keeps the budget
    while decoding: each step ends with a plan, and is slow.
    """
    base = based_on("criticalkv", score)
    if not isinstance(base.score, AccumulatedAttention | LastAttention | WindowAttention):
        raise OptionError(f"criticalkv: score={score!r} is not an amount of attention that values could be weighed by")
    return replace(base, score=CriticalValues(base.score, first, eps, numbers), every_step=decode == "evict")
