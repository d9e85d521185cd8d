"""SnapKV: selection of a prompt by an observation window (Li et al., NeurIPS 2024, arXiv:2404.14469)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.methods._base import across_layers
from millpond.methods._options import Across, GrowInPaper, SinksAdded
from millpond.option_ranges import POOL_WIDTHS, QUERIES
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import WindowAttention


@method("snapkv", paper="arXiv:2404.14469")
def snapkv(
    window: Annotated[int, "queries at the prompt's end that vote; their entries always stay", QUERIES] = 32,
    kernel: Annotated[int, "width of the pool over neighbouring positions; the paper has 7", POOL_WIDTHS] = 21,
    pool: Annotated[Literal["max", "avg", "none"], "kind of pool"] = "max",
    reduce: Annotated[
        Literal["mean", "max", "sum"], "query heads of a GQA group to their KV head, before the pool"
    ] = "mean",
    sinks: SinksAdded = 0,
    decode: GrowInPaper = "grow",
    across: Across = False,
) -> Policy:
    """Keep what the last queries of the prompt attend to, chosen per KV head, once.

    c_j = mean_i A_ij over the window's queries, pooled; the best (budget - window) entries and the window stay.
    The window of 32 and the max pool are those of the paper's LongBench settings.

    The pool decides how much of an answer is kept: the question attends to the beginning of the answer, and its other
    tokens get attention only after the first ones are generated. A pool of 7 keeps three neighbours on each side, so
    that answers of more tokens end early; one of 21 keeps ten. A real model's numbers of seven digits, at 20 % of 1,024
    tokens: 2 of 40 with 7, 31 of 40 with 21, 39 of 40 with 21 and pool="avg" (benchmarks/quality/pool_widths.py), which
    loses passages of several words on pond-recall (0.53 where max has 0.99). Where few entries are free besides the
    window, a wide pool holds too few places: at a budget of 64 pond-recall loses 22 points with 21.

    Departs from the paper: its pool is 7 wide (kernel=7). One set per KV head (the official code stores one per query
    head, group times the memory). decode="evict" keeps the budget while decoding, by the attention accumulated since
    the prompt's end.
    """
    policy = Policy(
        score=WindowAttention(window=window, kernel=kernel, pool=pool),
        protect=Protect(sinks=sinks, recent=window),
        reduce=reduce,
        every_step=decode == "evict",
        once=decode == "once",
    )
    return across_layers("snapkv", policy, across)
