"""KVzap: a small network predicts KVzip+'s score from the hidden state (2026, arXiv:2601.07891)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._competition import Compete, competition
from millpond.methods._networks import named_networks
from millpond.methods._options import SinksAdded
from millpond.option_files import FILE
from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS, Range
from millpond.policy.head_allocation import AboveThreshold
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.over_hidden import OverHidden
from millpond.policy.threshold_policy import ThresholdPolicy
from millpond.policy.trained.kinds import GELU, LINEAR

#: Kinds of networks that this method takes.
KINDS = (LINEAR, GELU)
#: Newest entries that always stay: with a threshold (the paper), and as a share of a budget.
WINDOW, WINDOW_SHARE = 128, 0.1


@method("kvzap", paper="arXiv:2601.07891")
def kvzap(
    networks: Annotated[
        str, "a file of 'millpond train kvzap', or of 'millpond train import', for this model; none comes along", FILE
    ] = "",
    threshold: Annotated[
        float | str,
        "entries whose predicted log-score is lower leave; none: a budget decides instead. The paper has -6 to -3 for "
        "Qwen3 and -9 to -6 for Llama 3.1",
        Range(-math.inf, math.inf),
    ] = "none",
    window: Annotated[
        int | float | str,
        "newest positions that always stay: a count, or without a threshold a share of the budget; auto: 128 with a "
        "threshold (the paper), a tenth of the budget without",
        POSITIONS,
        SHARE,
    ] = "auto",
    sinks: SinksAdded = 0,
    decode: Annotated[
        Literal["evict", "grow"], "after the prompt: tokens that leave the window are judged too, or the cache grows"
    ] = "evict",
    every: Annotated[
        int, "with a threshold and decode=evict: tokens that leave the window before they are judged", SOME_POSITIONS
    ] = 1,
    compete: Compete = "no",
) -> Policy:
    """Keep the entries that, by their hidden state, a repetition of the text would read.

    s = W h + b, or s = W2 GELU(W1 h + b1) + b2, for each layer, one number per KV head, where h is what the attention
    module reads of the token: its normed hidden state. The network was trained to predict log s+_j,
    s+_j = max_i max_h A_hij |v_j W_O| / |h_i| over the tokens i that repeat the text and the query heads of the group
    (Equation 3). A score is made when its entry is written, is stored with it and never changes.

    With a threshold, entry j of a KV head leaves if s_j < threshold, once it is no longer among the newest `window`
    positions: those of a prompt when it ends, later ones when they leave the window. So the text decides how much is
    kept. A budget is then the most that it may be; without one there is no limit. With threshold=none the highest
    scores fill the budget: of each head, or with compete="layer" or "model" of all heads together.

    Departs from the paper: evicted entries leave memory, in place of a mask over them. Scores are float32, so that a
    threshold has no grain of 1/32 as in 16 bits. A short later turn, such as a question, stays whole. With a budget
    and decode=evict the decode kernel evicts the lowest score at each step.
    """
    evicts = decode == "evict"
    found = named_networks("kvzap", networks, KINDS)
    grace = 1 if evicts else 0  # an entry gets its score when its step has stored it
    if isinstance(threshold, str):
        if threshold != "none":
            raise OptionError(f"kvzap: threshold={threshold!r} must be a number, or none")
        if every > 1:
            raise OptionError(f"kvzap: every={every} belongs to a threshold; leave it out, or give threshold=-6")
        protect = Protect(sinks=sinks, recent=_newest(window, WINDOW_SHARE), grace=grace)
        layers, heads = competition("kvzap", compete, protect, prefill="once", decode=decode)
        return Policy(score=OverHidden(KINDS, found), layers=layers, heads=heads, protect=protect, every_step=evicts)
    if compete != "no":
        raise OptionError(
            f"kvzap: compete={compete!r} shares out a budget, and threshold={threshold:g} decides without one; leave "
            "one of the two out"
        )
    newest = _newest(window, WINDOW)
    if isinstance(newest, float):
        raise OptionError(f"kvzap: window={window} is a share of a budget, and a threshold has none; name a count")
    return ThresholdPolicy(
        score=OverHidden(KINDS, found, evict=None),
        protect=Protect(sinks=sinks, recent=newest, grace=grace),
        heads=AboveThreshold(threshold),
        every_step=evicts,
        plan_every=every if evicts else 1,
    )


def _newest(window: int | float | str, usual: int | float) -> int | float:
    """Return the newest entries that stay.

    Raises:
        OptionError: neither a number nor auto.
    """
    if isinstance(window, str):
        if window != "auto":
            raise OptionError(f"kvzap: window={window!r} must be a count, a share of the budget, or auto")
        return usual
    return window
