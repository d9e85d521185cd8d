"""Competition of heads and layers by scores that were stored with the entries (Locret, KVzap, Fast KVzip)."""

from __future__ import annotations

from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.policy.head_allocation import Ada, HeadAllocation, Uniform
from millpond.policy.layer_allocation import AcrossLayers, EvenLayers, LayerAllocation, PromptLayers
from millpond.policy.protect import Protect

#: With decode="evict": steps from one competition of the heads to the next, as `ada` has them.
ROUND = 8

#: Who competes for which budget.
Competition = Literal["no", "layer", "model"]
Compete = Annotated[
    Competition,
    "every KV head has the same budget, or the heads of a layer compete for its budget, or those of all layers for "
    "the model's: by the attention that the networks expect",
]


def competition(
    owner: str, compete: Competition, protect: Protect, *, prefill: str, decode: str
) -> tuple[LayerAllocation | PromptLayers, HeadAllocation]:
    """Return the split of a budget over layers and over the heads of one.

    Args:
        owner: Name of the method.
        compete: Who competes.
        protect: Entries that stay in every head of every layer, where layers compete.
        prefill: How a prompt is read.
        decode: What happens behind it.

    Raises:
        OptionError: layers would compete while entries leave at each step or chunk.
    """
    if compete == "model" and (prefill == "chunks" or decode == "evict"):
        raise OptionError(
            f"{owner}: with prefill={prefill!r} and decode={decode!r} layers cannot compete, which takes one plan at "
            "the prompt's end; use compete='layer', or prefill='once' with decode='grow' or 'once'"
        )
    layers = AcrossLayers(protect) if compete == "model" else EvenLayers()
    heads = Uniform() if compete == "no" else Ada(alpha=0.0, every=ROUND if decode == "evict" else 0)
    return layers, heads
