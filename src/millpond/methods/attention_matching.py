"""Attention Matching: what stays is fitted to what queries got from everything (2026, arXiv:2602.16284)."""

from __future__ import annotations

from typing import Annotated

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._options import Sinks
from millpond.methods._repetition import REPEAT, Ask, RepeatChunk, asked_ids
from millpond.option_ranges import SHARE, Range
from millpond.policy.head_allocation import Ada
from millpond.policy.layer_allocation import AcrossLayers, EvenLayers
from millpond.policy.matched_merge import MatchAttention
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.reconstruction_policy import Rebuilt, ReconstructionPolicy

#: Queries of the repetition that a fit may use: more take seconds a layer.
MOST_QUERIES = 8192


@method("attention_matching", paper="arXiv:2602.16284")
def attention_matching(
    ask: Ask = REPEAT,
    chunk: RepeatChunk = 2048,
    queries: Annotated[int, "queries of the repetition to fit to, evenly spread", Range(1, MOST_QUERIES)] = 256,
    masses: Annotated[bool, "entries that stay count for more or less than one"] = True,
    values: Annotated[bool, "entries that stay get other values"] = True,
    ridge: Annotated[float, "weight of masses and values as they were in the fit", Range(1e-8, 1e3)] = 1e-3,
    alpha: Annotated[float, "share of the budget that every head is guaranteed, 0 to 1", SHARE] = 0.0,
    across: Annotated[bool, "the heads of all layers compete; else every layer has its budget"] = True,
    sinks: Sinks = 4,
) -> Policy:
    """Keep what a repetition of the context attends to, fitted to stand for the rest.

    Entries are chosen as `kvzip` does. Then, in each KV head, those that stay get masses b and values V, so that
    `queries` queries of the repetition, evenly spread, get from what stays what they got from everything: first the
    sum of the exponentials, sum_S b_j exp(q k_j) = sum_j exp(q k_j) with e^-3 <= b <= e^3, then the output, both by
    least squares (the paper's three steps). The logarithm of a mass is added to the logit. Costs a second prefill, and
    a fit for each head.

    Departs from the paper: keys are those of the largest attention from any query of the repetition, not of the
    largest root mean square, and heads and layers compete by it where the paper has measured shares of heads. Queries
    are 256 of a repetition over the full cache; there they are up to 50,000, made over the fitted layers below. With so
    few, an entry whose own query is not among them would be bent to serve the others: so each is held to what it was
    with the weight of its strongest query (`MatchAttention`). Both fits are relative to the sum of a query's
    exponentials. Sinks are left as they are, and layers with a sliding window are fitted over what their queries see.
    Values of models that cache latents are their keys too, so these are refused.
    """
    if not (masses or values):
        raise OptionError("attention_matching: masses=false and values=false leave nothing to fit; use kvzip")
    protect = Protect(sinks=sinks)
    return ReconstructionPolicy(
        score=Rebuilt(),
        protect=protect,
        heads=Ada(alpha),
        layers=AcrossLayers(protect) if across else EvenLayers(),
        every_step=False,
        merge=MatchAttention(masses, values, ridge),
        mass_bias=masses,
        ask=ask,
        ids=asked_ids("attention_matching", ask),
        chunk=chunk,
        queries=queries,
    )
