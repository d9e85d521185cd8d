"""Locret: trained retaining heads score each entry when it is written (Huang et al., 2024, arXiv:2410.01805)."""

from typing import Annotated, Literal

from millpond.errors import DataError, OptionError
from millpond.methods import method
from millpond.methods._competition import Compete, competition
from millpond.methods._options import Chunk, ChunkedPrefill, Grow
from millpond.option_files import FILE, read_file
from millpond.option_ranges import POSITIONS, SHARE
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.trained import Retained
from millpond.policy.trained.file import heads_of
from millpond.policy.trained.networks import RetainingHeads


@method("locret", paper="arXiv:2410.01805")
def locret(
    heads: Annotated[
        str, "a file of 'millpond train retain' for this model; empty: those that come with the package", FILE
    ] = "",
    sinks: Annotated[int, "first positions that always stay; the paper has none", POSITIONS] = 4,
    recent: Annotated[
        int | float,
        "newest entries that stay at the prompt's end: a share of the budget (0.1) or a count (100)",
        POSITIONS,
        SHARE,
    ] = 0.1,
    prefill: ChunkedPrefill = "once",
    chunk: Chunk = 256,
    stabilizers: Annotated[
        int | float, "newest entries that stay when a chunk ends: a share of the budget or a count", POSITIONS, SHARE
    ] = 0.25,
    decode: Grow = "grow",
    compete: Compete = "no",
    positions: Annotated[
        Literal["absolute", "cache_relative"], "keys stay where the text put them, or gaps close (the paper)"
    ] = "absolute",
) -> Policy:
    """Keep entries that a small trained network expects to be used, for any later question.

    s = W2 SiLU(W1 [q; k; v] + b1) + b2 for each layer, one number per KV head, of the token's own query, key and value
    before RoPE (Section 3.2). A score depends on the text before it alone, is stored with its entry, and never
    changes. `millpond train retain` trains the heads on a frozen model: they learn the largest attention that any
    later question pays to the entry.

    prefill="chunks" evicts while the prompt is read (Algorithm 1): no layer ever holds more than the budget and a
    chunk. The newest `stabilizers` stay between chunks.

    With compete="layer" or "model" heads have budgets by the prompt, as in Ada-KV: a score is then the log-probability
    that the network expects, which means the same in every head, and the best entries of all heads stay.

    Departs from the paper: heads have biases, and each head's scores are turned into quantiles of its own, which
    changes no choice within a head and lets heads be compared. Sinks stay, the newest share of the budget stays in
    place of the last 100 tokens of the prompt, and keys keep their positions (positions="cache_relative" closes gaps).
    The paper evicts in chunks of 1,024 or 3,072 tokens with 2,500 stabilizers, and keeps what is decoded.
    """
    layers, split = competition("locret", compete, Protect(sinks=sinks), prefill=prefill, decode=decode)
    grace = 1 if decode == "evict" else 0  # an entry gets its score when its step has stored it
    return Policy(
        score=Retained(_load(heads), expecting=compete != "no"),
        layers=layers,
        heads=split,
        protect=Protect(sinks=sinks, recent=recent, grace=grace),
        prefill=prefill,
        chunk=chunk,
        stabilizers=stabilizers if prefill == "chunks" else 0,
        every_step=decode == "evict",
        once=decode == "once",
        positions=positions,
    )


def _load(path: str) -> RetainingHeads | None:
    if not path:
        return None
    try:
        return heads_of(read_file(path), str(path))
    except (OptionError, DataError) as error:
        raise OptionError(f"locret: heads={path!r}: {error}") from None
