"""StreamingLLM: attention sinks (Xiao et al., ICLR 2024, arXiv:2309.17453)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.methods._options import EvictInPaper
from millpond.option_ranges import Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Recency


@method("streaming", paper="arXiv:2309.17453")
def streaming(
    sinks: Annotated[
        int, "first positions that always stay; each takes twice as much again outside the pages", Range(0, 1024)
    ] = 4,
    positions: Annotated[
        Literal["cache_relative", "absolute"], "close the gap after the sinks (the paper), or leave it"
    ] = "cache_relative",
    decode: EvictInPaper = "evict",
) -> Policy:
    """Keep the first tokens and the newest ones, at positions inside the cache.

    So a text may be endless.

    Keeps [0, sinks) and the newest budget - sinks entries. Attention depends on distances only, so the paper's
    in-cache positions are reached by rotating just the sinks, exactly, to lie right before the oldest recent entry.
    """
    return Policy(
        score=Recency(),
        protect=Protect(sinks=sinks),
        every_step=decode == "evict",
        once=decode == "once",
        positions=positions,
    )
