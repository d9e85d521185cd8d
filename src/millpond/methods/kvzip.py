"""KVzip: entries that the model needs to reconstruct its context (Kim et al., 2025, arXiv:2505.23416)."""

from __future__ import annotations

from typing import Annotated

from millpond.methods import method
from millpond.methods._options import Sinks
from millpond.methods._repetition import REPEAT, Ask, RepeatChunk, asked_ids
from millpond.option_ranges import SHARE
from millpond.policy.head_allocation import Ada
from millpond.policy.layer_allocation import AcrossLayers, EvenLayers
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.reconstruction_policy import Rebuilt, ReconstructionPolicy


@method("kvzip", paper="arXiv:2505.23416")
def kvzip(
    ask: Ask = REPEAT,
    chunk: RepeatChunk = 2048,
    alpha: Annotated[float, "share of the budget that every head is guaranteed, 0 to 1", SHARE] = 0.0,
    across: Annotated[bool, "the heads of all layers compete (the paper); else every layer has its budget"] = True,
    sinks: Sinks = 4,
) -> Policy:
    """Keep the entries attended to when the model repeats its context, for any later question.

    After a prompt the model reads it once more (without the token that marks a text's beginning), behind a question
    for it and over its own cache. s_j = max_i max_h A_hij over the tokens i of question and repetition and the query
    heads h of the KV head (Equation 2). The heads of all layers compete for the budget of the model, so that one
    layer may hold several times as much as another; no layer is guaranteed more than its sinks. across=false gives
    every layer the same total, for which its heads compete. The repetition is taken back, costs about a second prefill,
    and changes no output.

    Departs from the paper: there the softmax is over the repeated chunk and the question alone; here it is the model's
    own, over everything held, and every entry counts in every pass. Each later turn, and each chunk of a prompt in
    chunks, is repeated when it ends, with what was decoded before it; older entries keep the larger of their scores.
    Not for assisted generation.
    """
    protect = Protect(sinks=sinks)
    return ReconstructionPolicy(
        score=Rebuilt(),
        protect=protect,
        heads=Ada(alpha),
        layers=AcrossLayers(protect) if across else EvenLayers(),
        every_step=False,
        ask=ask,
        ids=asked_ids("kvzip", ask),
        chunk=chunk,
    )
