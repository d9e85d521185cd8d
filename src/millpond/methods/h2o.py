"""H2O: heavy-hitter oracle (Zhang et al., NeurIPS 2023, arXiv:2306.14048)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.methods._options import EvictInPaper, GroupReduce, Recent, Sinks
from millpond.option_ranges import POSITIONS, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention


@method("h2o", paper="arXiv:2306.14048")
def h2o(
    recent: Recent = 0.5,
    sinks: Sinks = 4,
    grace: Annotated[int, "steps for which a new entry cannot be evicted", POSITIONS] = 0,
    average: Annotated[bool, "divide the score by the number of queries that saw the entry"] = False,
    decay: Annotated[
        float,
        "factor on all gathered attention at each new token (A2SF), above 0 to 1; 1 forgets nothing",
        Range(0.0, 1.0, above=True),
    ] = 1.0,
    reduce: GroupReduce = "mean",
    prefill: Annotated[
        Literal["once", "greedy"], "plan once at the prompt's end, or evict at each of its tokens"
    ] = "once",
    decode: EvictInPaper = "evict",
    positions: Annotated[
        Literal["absolute", "cache_relative"],
        "where the text put the entries, or close the gaps between them before the trained positions end",
    ] = "absolute",
) -> Policy:
    """Keep the entries that have gathered most attention, and the newest ones.

    The score of entry j is the attention it has received from every query since it was written, in float32:
    s_j = sum_i A_ij (Algorithm 2). At each step the lowest score among all unprotected entries leaves, and the
    softmax runs over what is kept (Definition 2.2).

    With a decay below 1 what was attended to long ago counts for less: A2SF's forgetting factor (Jo and Shin, 2024,
    arXiv:2407.20485), s_j = sum_i decay**(n - i) A_ij at query n. Its half-life is log(0.5) / log(decay) tokens.

    What it loses: facts that the text itself seldom attends to, where a question asks for them later
    ([counts](../../how-to/choose-a-method.md#which-settings-still-state-a-fact)).

    Departs from the paper: Algorithm 2 as printed scores the new token 0 and would freeze; the recent window of
    sections 3.2 and 5 is part of the definition here. Sinks are protected (set sinks=0 for the paper's rule). The
    heads of a GQA group, which the paper does not treat, are averaged. With decode="grow" or "once" scores are those of
    the prompts' queries: what decoding attends to is not gathered.

    With positions="cache_relative" a text may be longer than the positions the model was trained on. The paper gives
    each entry its place in the cache at every step; here gaps close all at once, when the newest token would lie
    behind the trained positions, and distances are those of the text until then.
    """
    return Policy(
        score=AccumulatedAttention(average, decay),
        protect=Protect(sinks=sinks, recent=recent, grace=grace),
        reduce=reduce,
        every_step=decode == "evict",
        once=decode == "once",
        prefill=prefill,
        positions=positions,
    )
