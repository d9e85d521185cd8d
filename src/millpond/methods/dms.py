"""DMS: eviction below a score threshold (dynamic memory sparsification, Lancucki et al., 2025, arXiv:2506.05345)."""

import math
from dataclasses import replace
from typing import Annotated

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.methods._options import SinksAdded
from millpond.option_ranges import POSITIONS, Range
from millpond.policy.head_allocation import AboveThreshold, Ada
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect


@method("dms", paper="arXiv:2506.05345")
def dms(
    threshold: Annotated[
        float | str,
        "entries whose score is lower leave; auto: the threshold of each layer that meets its budget",
        Range(-math.inf, math.inf),
    ] = "auto",
    score: Annotated[str, "the method whose score is compared: expected_attention, snapkv, knorm, ..."] = "snapkv",
    window: Annotated[int, "newest positions about which nothing is decided yet; the paper has 256", POSITIONS] = 64,
    sinks: SinksAdded = 0,
) -> Policy:
    """Evict every entry that scores below a threshold, in any head; budgets follow the text.

    Entry j of head h leaves if s_hj < threshold, once the prompt is read. With a number the text says how much is
    kept, and the budget is the most that it may be: where more lies above, the highest scores of the layer stay. A
    budget of "100%" leaves the threshold alone; its scale is that of the score, such as the mean attention of the last
    queries with snapkv. With "auto" every layer keeps its budget exactly, by the threshold that does so.

    Departs from the paper: there the model is trained to predict what can leave; here any other method's score says
    it, without training. The paper decides about each token when it falls out of the window while decoding; here the
    cache grows after the prompt, and is compressed again at the end of each turn. For eviction at each step see ada.
    """
    base = based_on("dms", score)
    if base.shared:
        raise OptionError(f"dms: score={score!r} has no score per head to compare with a threshold")
    if base.prefill == "greedy":
        raise OptionError(f"dms: score={score!r} decides at each token; leave out prefill=greedy")
    if isinstance(threshold, str) and threshold != "auto":
        raise OptionError(f"dms: threshold={threshold!r} must be a number, or auto")
    return replace(
        base,
        protect=Protect(sinks=sinks, recent=window),
        heads=Ada(alpha=0.0) if isinstance(threshold, str) else AboveThreshold(threshold),
        every_step=False,
    )
