"""DuoAttention: retrieval heads and streaming heads (Xiao et al., ICLR 2025, arXiv:2410.10819)."""

import json
from dataclasses import replace
from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.option_files import FILE, read_file
from millpond.option_ranges import POSITIONS, SHARE
from millpond.policy.allocation.retrieval_heads import ProfiledLayers, RetrievalHeads, RetrievalLayers, ThenRecency
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect


@method("duo_attention", paper="arXiv:2410.10819")
def duo_attention(
    heads: Annotated[
        str, "a JSON file, per layer a list of one number per KV head; empty: profiled from the prompt", FILE
    ] = "",
    threshold: Annotated[float, "a head whose number is above is a retrieval head, 0 to 1", SHARE] = 0.5,
    sinks: Annotated[int, "first positions that always stay; the paper has 64", POSITIONS] = 4,
    recent: Annotated[int, "newest positions that always stay; the paper has 256", POSITIONS] = 64,
    score: Annotated[str, "the method that chooses inside retrieval heads, and whose queries are watched"] = "snapkv",
    across: Annotated[bool, "retrieval heads of all layers have equal parts; else every layer has its budget"] = False,
    decode: Annotated[
        Literal["grow", "evict"], "retrieval heads after the prompt: grow (the paper), or evict at each step"
    ] = "grow",
) -> Policy:
    """Let streaming heads keep the sinks and the newest entries alone, and give the rest to the retrieval heads.

    Which heads are retrieval heads says a table of numbers from 0 (streaming) to 1 (retrieval), such as the gates
    that the authors train, or the prompt: the share of a head's observed attention that goes beyond sinks and newest,
    sum_{sinks <= j < n - recent} sum_i A_ij / sum_ij A_ij. Retrieval heads share what the streaming heads leave in
    equal parts; `score` chooses inside them, and they keep everything where that fits. With `across` they share what
    the streaming heads of all layers leave. That is known at once from a table; from a profile when all layers have
    read it, or a chunk of it: until the end of that pass nothing leaves, and assisted generation is not possible.

    Departs from the paper: there retrieval heads keep everything, whatever that takes; here the total is the budget.
    Its gates are trained on passkeys, and a quantile of them parts the heads; here a threshold does. Heads are those
    of the cache, groups of query heads. Where the whole prompt fits into the budget all heads may fill up to the same
    length before any evicts. A head profiled as a streaming head stays one in later turns: it holds nothing far.
    """
    base = based_on("duo_attention", score)
    assert base.score is not None, "a base has a score"
    if base.prefill == "greedy":
        raise OptionError(f"duo_attention: score={score!r} plans at each token; leave out prefill=greedy")
    if decode == "evict" and base.score.evict is None:
        raise OptionError(f"duo_attention: decode=evict, but score={score!r} plans at each step; take decode=grow")
    if not heads and base.score.queries not in ("all", "window"):
        raise OptionError(
            f"duo_attention: score={score!r} watches no attention; use one that does, such as snapkv or h2o, or name "
            "a table of heads"
        )
    split = RetrievalHeads(threshold, sinks, recent, decode == "grow", _table(heads) if heads else ())
    return replace(
        base,
        score=ThenRecency(base.score) if decode == "grow" else base.score,
        protect=Protect(sinks=sinks, recent=recent),
        heads=split,
        layers=_layers(split) if across else base.layers,
        every_step=True,
    )


def _layers(split: RetrievalHeads) -> RetrievalLayers | ProfiledLayers:
    shares = tuple(sum(number > split.threshold for number in row) / len(row) for row in split.table)
    return RetrievalLayers(shares) if shares else ProfiledLayers(split)


def _table(path: str) -> tuple[tuple[float, ...], ...]:
    try:
        rows = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"duo_attention: heads={path!r} cannot be read as JSON: {error}") from None
    is_table = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    if not is_table or not all(isinstance(number, int | float) for row in rows for number in row):
        raise OptionError(f"duo_attention: heads={path!r} must be a list of layers, each a list of one number per head")
    return tuple(tuple(float(number) for number in row) for row in rows)
