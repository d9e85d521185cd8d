"""TOVA: token omission via attention (Oren et al., 2024, arXiv:2401.06104)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.methods._options import EvictInPaper
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import LastAttention


@method("tova", paper="arXiv:2401.06104")
def tova(
    pin_newest: Annotated[bool, "the newest entry cannot be the one that leaves; the paper lets it"] = False,
    prefill: Annotated[
        Literal["once", "greedy"], "plan once at the prompt's end, or token by token as in the paper"
    ] = "once",
    decode: EvictInPaper = "evict",
) -> Policy:
    """Drop the entry that the newest query attends to least, the same in all heads of a layer.

    s_j = mean_h A[h, t, j] over all query heads h of the layer, t the newest query; no window, no sinks.

    Departs from the paper: the default plans the prompt once at its end, as the official code does; prefill="greedy"
    is the paper's token-by-token rule. decode="grow" and "once" leave what is decoded alone; prefill="greedy" evicts
    at each token, so it goes with decode="evict" only.
    """
    return Policy(
        score=LastAttention(),
        protect=Protect(recent=1 if pin_newest else 0),
        shared=True,
        every_step=decode == "evict",
        once=decode == "once",
        prefill=prefill,
    )
