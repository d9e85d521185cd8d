"""R-KV: importance without redundancy (Cai et al., NeurIPS 2025, arXiv:2505.24133)."""

from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._options import GroupReduce, SinksAdded
from millpond.option_ranges import POOL_WIDTHS, QUERIES, SHARE, SOME_POSITIONS, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import WindowAttention
from millpond.policy.scores.redundancy import ImportanceAndRedundancy


@method("rkv", paper="arXiv:2505.24133")
def rkv(
    blend: Annotated[float, "weight of importance against redundancy, 0 to 1 (the paper's lambda)", SHARE] = 0.1,
    window: Annotated[int, "last queries that vote; their entries always stay", QUERIES] = 8,
    kernel: Annotated[int, "width of the max pool over neighbouring positions, odd", POOL_WIDTHS] = 7,
    threshold: Annotated[float, "cosine above which two keys say the same", Range(-1.0, 10.0)] = 0.5,
    spared: Annotated[int, "newest keys like a given one that do not count as redundant to it", Range(0, 16)] = 1,
    reduce: GroupReduce = "max",
    sinks: SinksAdded = 0,
    buffer: Annotated[
        int, "while decoding: entries that gather beyond the budget before they are compressed", SOME_POSITIONS
    ] = 128,
    decode: Annotated[Literal["evict", "grow"], "after the prompt: evict what the buffer holds, or grow"] = "evict",
) -> Policy:
    """Keep what the last queries attend to, unless other keys of the head say the same.

    s_j = lambda I_j - (1 - lambda) R_j. I is the attention of the last `window` queries, max-pooled over neighbours;
    R is the softmax over j of the mean over i of cos(k_i, k_j), without the diagonal and, for each key i, without the
    `spared` newest keys j whose cosine with it is above the threshold, so that the newest of a family stays.

    While decoding `buffer` entries gather; then the newest `window` queries choose again, and the budget is met. So up
    to buffer - 1 entries are held beyond it; buffer=1 never exceeds the budget, and is slow.

    Departs from the paper: attention is the model's own, over all that the queries see (the official code leaves the
    window out of its softmax). A key to which none is similar spares none (there position 0). decode="grow" plans at
    the end of prompts alone.
    """
    if kernel % 2 == 0:
        raise OptionError(f"rkv: kernel={kernel} must be odd, so that the pool keeps its place")
    if decode == "grow" and buffer != 128:
        raise OptionError(f"rkv: buffer={buffer}, but nothing leaves while decoding; leave it out")
    return Policy(
        score=ImportanceAndRedundancy(WindowAttention(window=window, kernel=kernel), blend, threshold, spared),
        protect=Protect(sinks=sinks, recent=window),
        reduce=reduce,
        every_step=decode == "evict",
        plan_every=buffer if decode == "evict" else 1,
    )
