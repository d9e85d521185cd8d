"""LagKV: scores relative to the chunk of text that follows an entry (Liang et al., 2025, arXiv:2504.04704)."""

from typing import Annotated

from millpond.methods import method
from millpond.methods._options import Chunk, ChunkedPrefill, Grow, Sinks
from millpond.option_ranges import MOST_POSITIONS, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.lag_relative import LagRelative


@method("lagkv", paper="arXiv:2504.04704")
def lagkv(
    lag: Annotated[int, "positions of a chunk; each is measured by the next one", Range(2, MOST_POSITIONS)] = 128,
    sinks: Sinks = 4,
    across: Annotated[bool, "compare the entries of all chunks; else every chunk keeps the same number"] = False,
    prefill: ChunkedPrefill = "once",
    chunk: Chunk = 256,
    decode: Grow = "grow",
) -> Policy:
    """Keep the entries whose keys and values stand out against the chunk of text that follows them.

    After the sinks the text is cut into chunks of `lag` positions. Keys and values of a chunk are scaled, channel by
    channel, by the minimum and maximum of the next chunk; the standard deviation over channels, softmax over the
    chunk, averaged over keys and values, is the score. Every chunk keeps its best; the last full chunk and the rest
    after it have no reference and stay. No attention is observed.

    A text shorter than sinks + 2 * lag has no reference at all, and a budget below sinks + lag has no room for more
    than what stays: there the newest entries are kept.

    Departs from the paper: the budget is met exactly, so chunks may differ by one entry. While the text grows,
    chunks keep their places, and all evict entries in step. decode="evict" does so at each step, which ends with a
    plan and is slow; the paper waits for a chunk to fill.
    """
    return Policy(
        score=LagRelative(lag=lag, sinks=sinks, across=across),
        protect=Protect(sinks=sinks),
        prefill=prefill,
        chunk=chunk,
        every_step=decode == "evict",
        once=decode == "once",
    )
