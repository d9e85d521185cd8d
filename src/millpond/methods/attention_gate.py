"""Attention-Gate: a trained gate flags each entry when it is written (Zeng et al., 2024, arXiv:2410.12876)."""

from typing import Annotated, Literal

from millpond.errors import DataError, OptionError
from millpond.methods import method
from millpond.option_files import FILE, read_file
from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS
from millpond.policy.allocation.gated_heads import GatedHeads
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.retaining.file import gates_of
from millpond.policy.retaining.gates import SINKS, WINDOW, Gates
from millpond.policy.scores.gated import Gated
from millpond.policy.variants.gates import GatePolicy


@method("attention_gate", paper="arXiv:2410.12876")
def attention_gate(
    gate: Annotated[
        str, "a file of 'millpond train gate' for this model; empty: the one that comes with the package", FILE
    ] = "",
    threshold: Annotated[float, "an entry whose probability is above it stays, 0 to 1", SHARE] = 0.5,
    sinks: Annotated[int, "first positions that always stay", POSITIONS] = SINKS,
    window: Annotated[int, "newest positions that always stay, as in training", POSITIONS] = WINDOW,
    floor: Annotated[
        int | float, "entries that a KV head keeps at least: a count, or a share of those it has", POSITIONS, SHARE
    ] = 0,
    decode: Annotated[
        Literal["evict", "grow"], "after the prompt: act on the flags of new tokens too, or grow until the next turn"
    ] = "evict",
    every: Annotated[int, "with decode=evict: new tokens from one look at the flags to the next", SOME_POSITIONS] = 16,
) -> Policy:
    """Let a trained gate say of each token whether a KV head keeps its entry, so that the text says how much is kept.

    p = sigmoid(W2 SiLU(W1 [x; u] + b1) + b2) for each layer, one number per KV head, where x is the query, key and
    value of the token before RoPE and u an attention of a few narrow heads: causal, over those of the text so far, or
    with a file of `millpond train gate --global` over the whole prompt, which is then read in one pass. An entry with
    p > threshold is kept; sinks and the newest `window` positions stay whatever it says. A flag never changes; a causal
    one depends on the text before it alone. Without a budget the cache is as large as the flags make it; a budget
    is the most that it may be: where more is flagged, the highest p of a layer stay. `millpond train gate` trains the
    gate on a frozen model, for a share that is to be kept.

    What a gate has read, a narrow key and value of each token in 16 bits, is kept besides the entries
    (`stats().gate_bytes`), since later flags look back at it.

    Departs from the paper: it hides what is evicted from the rest of the prompt; here a prompt is read in full, and
    what has no flag leaves when it ends. The gate sees the layer's normed input through the query, key and value that
    are made of it, and a layer of its own between attention and flag; the paper has the input and one linear map. A
    short later turn, such as a question, stays whole. The paper's gate looks at the whole prompt: that is --global; the
    tokens behind the prompt look back from where they stand.
    """
    evicts = decode == "evict"
    return GatePolicy(
        score=Gated(_load(gate)),
        protect=Protect(sinks=sinks, recent=window, grace=1 if evicts else 0),
        heads=GatedHeads(threshold, floor),
        every_step=evicts,
        plan_every=every if evicts else 1,
    )


def _load(path: str) -> Gates | None:
    if not path:
        return None
    try:
        return gates_of(read_file(path), str(path))
    except (OptionError, DataError) as error:
        raise OptionError(f"attention_gate: gate={path!r}: {error}") from None
