"""FastGen: the cheapest rule per head that keeps its attention (Ge et al., ICLR 2024, arXiv:2310.01801)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS
from millpond.policy.head_rules import HeadRulesPolicy
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention
from millpond.policy.token_classes import TokenClasses, parse_ids


@method("fastgen", paper="arXiv:2310.01801")
def fastgen(
    threshold: Annotated[
        float, "share of its attention that a head must keep, 0 to 1; 1 keeps everything", SHARE
    ] = 0.95,
    frequent: Annotated[
        float, "entries of most attention that a head may keep, as a share of the text so far", SHARE
    ] = 0.3,
    local: Annotated[float, "newest entries that a head may keep, as a share of the prompt", SHARE] = 0.3,
    sinks: Annotated[int, "first positions that count as special tokens, at least 1", SOME_POSITIONS] = 1,
    special: Annotated[str, "ids of the special tokens, as 0;1;2; auto is the tokenizer's, none is none"] = "auto",
    queries: Annotated[
        int, "recovery is measured on at most this many queries, evenly spread; 0 for all", POSITIONS
    ] = 128,
    punctuation: Annotated[str, "ids of the punctuation, as 5;6; auto is the tokenizer's, none is none"] = "auto",
    profile: Annotated[
        Literal["turn", "once"], "when heads are measured: at each turn, or once for the whole text (the paper)"
    ] = "turn",
) -> Policy:
    """Give each head the cheapest of five rules that keeps enough of the prompt's attention.

    The rules C are nested: special tokens; and punctuation; and the entries of most accumulated attention; and the
    newest; everything. A head takes the first with mean_i sum_{j in C(i)} A_ij >= threshold over the queries i of the
    prompt (Equation 2). While decoding it stores a new token if its rule keeps it, and lets it go when that ends; the
    pages return to the pool. Without a budget the cache is as large as the rules make it. A budget is a cap on the
    entries of a layer: beyond it the longest heads evict those of least attention; special tokens and punctuation,
    and the newest half of what such a head may hold, leave after all others.

    Departs from the paper: it leaves the norm and grouped heads open. Here recovery is the share of attention kept,
    and a KV head takes the dearest rule that one of its query heads needs. The first `sinks` positions count as
    special, so that no head is empty. The most attended entries are chosen by the whole prompt, and without those
    that the rule keeps anyway. Recovery is the mean over at most `queries` evenly spread queries. Each later turn,
    and each chunk of a prompt in chunks, is measured again; the paper, which knows one turn, measures once, as
    profile="once" does: the rules of the first turn, or of the first chunk, stay.
    """
    return HeadRulesPolicy(
        score=AccumulatedAttention(),
        protect=Protect(sinks=sinks),
        threshold=threshold,
        frequent=frequent,
        local=local,
        queries=queries,
        profiles_once=profile == "once",
        classes=TokenClasses(parse_ids("special", special), parse_ids("punctuation", punctuation)),
    )
