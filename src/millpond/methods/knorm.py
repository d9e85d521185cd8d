"""Knorm: keys of small norm are kept (Devoto et al., EMNLP 2024, arXiv:2406.11430)."""

from millpond.methods import method
from millpond.methods._options import Chunk, ChunkedPrefill, GrowInPaper, Recent, SinksAdded
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.key_geometry import KeyNorm


@method("knorm", paper="arXiv:2406.11430")
def knorm(
    recent: Recent = 0,
    sinks: SinksAdded = 0,
    prefill: ChunkedPrefill = "once",
    chunk: Chunk = 256,
    decode: GrowInPaper = "grow",
) -> Policy:
    """Keep the entries with the shortest keys, whatever the later question is.

    s_j = - ||k_j||_2: keys of small norm tend to gather most attention. No attention is observed, and
    rotary positions do not change a norm. Of norms that are equal but for rounding the newest stays. A model that
    normalises its keys (Gemma 3, Qwen3) leaves little or nothing in their norms to choose by: take keydiff there.

    Departs from the paper: its first layers, which it leaves whole, are compressed like the others here.
    decode="evict" keeps the budget while decoding: each step ends with a plan, and is slow.
    """
    return Policy(
        score=KeyNorm(),
        protect=Protect(sinks=sinks, recent=recent),
        prefill=prefill,
        chunk=chunk,
        every_step=decode == "evict",
        once=decode == "once",
    )
