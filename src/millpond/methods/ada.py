"""Ada-KV: head budgets by competition (Feng et al., 2024, arXiv:2407.11550)."""

from dataclasses import replace
from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.option_ranges import POSITIONS, SHARE
from millpond.policy.head_allocation import Ada
from millpond.policy.policy import Policy


@method("ada", paper="arXiv:2407.11550")
def ada(
    score: Annotated[
        str, "the method whose score, layers and triggers are used: snapkv, pyramidkv, h2o/sinks=0, ..."
    ] = "snapkv",
    alpha: Annotated[float, "share of the budget that every head is guaranteed, 0 to 1", SHARE] = 0.2,
    allocation: Annotated[
        Literal["floor", "official"],
        "floor guarantees each head its share and fills the budget exactly; official blends and rounds, as the "
        "authors' code does",
    ] = "floor",
    every: Annotated[
        int | str,
        "decoding steps from one competition of the heads to the next, 0 for none; auto is 8 for a score that evicts "
        "at each step, and none for others and for allocation=official",
        POSITIONS,
    ] = "auto",
) -> Policy:
    """Let the heads of a layer compete for its budget in one top-k, over any method's score.

    Minimises the bound ||y - y'||_1 <= 2HC - 2C sum_i sum_{j kept in i} A_ij (Theorem 3.1) over all allocations
    with the same total. Heads differ in length, and the pages of short heads really return to the pool.

    Over a score that evicts while decoding, the heads compete again at every `every`-th step: the entries that leave
    are then the lowest of all heads together, so that a head's share follows its scores. The total is exact at each
    step, and no head falls below its floor.

    Departs from the paper: over scores that evict while decoding heads go on competing, where the paper shares budgets
    out once, at the end of the prompt (every=0). SnapKV's pool is 7 wide there (score=snapkv/kernel=7). With b entries
    per head besides the protected ones, the authors' code gives head h round((1 - alpha) b*_h + floor(alpha b)), where
    b*_h is what it wins in one top-k without a floor, and so holds up to one entry per head less, or more, than the
    budget; allocation="official" does the same, but never more. Here each head keeps its best floor(alpha b) before the
    rest is competed for, so that alpha is what no head falls below, and the total is the budget.
    """
    base = based_on("ada", score)
    if base.shared:
        raise OptionError(f"ada: score={score!r} has no score per head to share budgets by")
    if allocation == "official":
        if every not in ("auto", 0):
            raise OptionError(f"ada: every={every}: allocation='official' shares budgets out once; leave it out")
        return replace(base, heads=Ada(alpha, blend=True))
    return replace(base, heads=Ada(alpha, _steps(every, base, score)))


def _steps(every: int | str, base: Policy, score: str) -> int:
    if every == "auto":
        return 8 if base.every_step and not base.plans_each_step else 0
    if not isinstance(every, int):
        raise OptionError(f"ada: every={every!r} must be a number of steps, or auto")
    if every and not base.every_step:
        raise OptionError(f"ada: every={every}, but score={score!r} evicts nothing while decoding; leave it out")
    if every and base.plans_each_step:
        raise OptionError(f"ada: every={every}, but score={score!r} plans at each step; leave it out")
    return every
