"""Fast KVzip: a gate per layer predicts KVzip's score from the hidden state (2026, arXiv:2601.17668)."""

from __future__ import annotations

from typing import Annotated

from millpond.methods import method
from millpond.methods._competition import Compete, competition
from millpond.methods._networks import named_networks
from millpond.methods._options import Chunk, ChunkedPrefill, Grow, Recent, Sinks
from millpond.option_files import FILE
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.over_hidden import OverHidden
from millpond.policy.trained.kinds import SINK_GATE


@method("fastkvzip", paper="arXiv:2601.17668")
def fastkvzip(
    networks: Annotated[str, "a file of 'millpond train import' for this model; none comes along", FILE] = "",
    sinks: Sinks = 4,
    recent: Recent = 0.1,
    compete: Compete = "model",
    prefill: ChunkedPrefill = "once",
    chunk: Chunk = 256,
    decode: Grow = "grow",
) -> Policy:
    """Keep the entries whose token attends to itself rather than to learned sinks.

    p = mean over the group of 1 / (1 + sum_m exp(q . sink_m / sqrt(d) - z)), z = q . k / sqrt(d) + b, with
    q = RMSNorm(Wq h + bq) of each query head and k = RMSNorm(Wk h) of its KV head, of d = 16 numbers, over what the
    attention module reads of the token. The gate was trained to predict KVzip's score, the most attention that a
    repetition of the text pays to the entry. The highest p of all layers and heads fill the budget together, as in the
    paper; with compete="layer" those of a layer do. The score is stored with its entry and never changes.

    Departs from the paper: there chunks of 16,000 tokens compete over all layers when each was read, and the newest
    4,096 tokens (2 % of a shorter text) stay; here all layers compete at the prompt's end, chunks
    (prefill="chunks") compete inside a layer, and `recent` counts in the budget. While decoding, there all layers
    compete every 128 tokens; here heads of a layer do at each step (decode="evict"). The bias b enters once, as in
    the authors' inference; their training script adds it twice.
    """
    layers, heads = competition("fastkvzip", compete, Protect(sinks=sinks), prefill=prefill, decode=decode)
    return Policy(
        score=OverHidden((SINK_GATE,), named_networks("fastkvzip", networks, (SINK_GATE,))),
        layers=layers,
        heads=heads,
        protect=Protect(sinks=sinks, recent=recent, grace=1 if decode == "evict" else 0),
        prefill=prefill,
        chunk=chunk,
        every_step=decode == "evict",
        once=decode == "once",
    )
