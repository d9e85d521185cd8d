"""Ada-KV: head budgets by competition (Feng et al., 2024, arXiv:2407.11550)."""

from dataclasses import replace
from typing import Annotated

from millpond.errors import OptionError
from millpond.methods import METHODS, method
from millpond.policy.allocate import Ada
from millpond.policy.policy import Policy


@method("ada", paper="arXiv:2407.11550")
def ada(
    score: Annotated[str, "the method whose score and triggers are used: snapkv, h2o, random, ..."] = "snapkv",
    alpha: Annotated[float, "share of the budget that every head is guaranteed, 0 to 1"] = 0.2,
) -> Policy:
    """Let the heads of a layer compete for the layer's budget in one top-k, over any other method's score.

    Minimises the bound ||y - y'||_1 <= 2HC - 2C sum_i sum_{j kept in i} A_ij (Theorem 3.1) over all allocations
    with the same total. Heads differ in length, and the pages of short heads really return to the pool.
    """
    base = METHODS.get(score)()
    if base.keeps_all or base.shared:
        raise OptionError(f"ada: score={score!r} has no score per head to share budgets by")
    return replace(base, heads=Ada(alpha))
