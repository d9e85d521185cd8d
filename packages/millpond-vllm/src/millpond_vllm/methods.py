"""Which methods can act on blocks of vLLM, and what changes when they do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millpond import OptionError, Policy
from millpond.plugins import NOTHING, EvenLayers, PromptHeadAllocation, PromptLayers, Uniform

#: Methods that act on blocks as they are, named in errors.
NEAREST = "snapkv, h2o, streaming, tova, keydiff, knorm, lagkv, criticalkv or expected_attention"

#: Why a need of a policy is not met here, by its name in `Needs`.
NEEDS = {
    "entropies": "scores tokens by the model's predictions, which an attention backend never sees",
    "prompt_repeat": "reads each prompt a second time, and vLLM's scheduler reads it once",
    "head_rules": "gives heads rules of their own, and a block holds as many entries of each head",
    "block_lookup": "stores everything and looks blocks up for each query, so no block would become free",
    "prompt_patterns": "evicts nothing but reads prompts by patterns, and vLLM's attention reads them whole",
}


@dataclass(frozen=True, slots=True)
class Change:
    """What a method does otherwise here than in `millpond.compress`.

    Attributes:
        part: Part of the method.
        says: Sentence about it.
    """

    part: str
    says: str


def changes(policy: Policy) -> list[Change]:
    """Return what a policy gives up to act on blocks: all heads of all layers hold the same number of entries."""
    found = []
    if not isinstance(policy.heads, Uniform):
        found.append(Change("heads", "all KV heads of a layer keep the same number of entries"))
    if not isinstance(policy.layers, EvenLayers):
        found.append(Change("layers", "all layers keep the same number of entries"))
    if policy.positions != "absolute":
        found.append(Change("positions", "entries stay at the positions of the text"))
    if policy.every_step:
        found.append(Change("decode", "entries leave with each block that is decoded, not with each token"))
    if policy.observes_all or policy.sums_queries:
        found.append(Change("prefix", "every query of a prompt is needed, so no prefix is taken from the cache"))
    return found


def reads_while_decoding(policy: Policy) -> bool:
    """Whether a policy needs the queries of tokens that are decoded.

    Scores of networks are those of every token: its block may be found as a prefix by the next turn of a conversation.
    """
    reads = policy.window > 0 or policy.observes_all or policy.sums_queries
    return policy.scores_entries or (policy.every_step and reads)


def fitted(name: str, policy: Policy) -> Policy:
    """Return a policy as it acts on blocks: equal counts for all heads and layers, positions of the text.

    Raises:
        OptionError: it cannot act on blocks; the reason, and what can.
    """
    reason = refusal(policy)
    if reason is not None:
        raise OptionError(f"millpond: method {name!r} {reason}; use {NEAREST}")
    return replace(policy, heads=Uniform(), layers=EvenLayers(), positions="absolute")


def refusal(policy: Policy) -> str | None:
    """Return why a policy cannot act on blocks; None if it can."""
    if policy.keeps_all and policy.needs == NOTHING:
        return None
    if policy.gates is not None or policy.needs.prompt_flags is not None:
        return "flags entries by gates over the model's hidden states, which an attention backend never sees"
    if policy.reads_hidden:
        return "scores entries by the model's hidden states, which an attention backend never sees"
    if policy.scores_entries and policy.entry_scores is None:
        return "needs the file of its networks, options={'heads': FILE}: vLLM's packed weights do not name the model"
    if policy.needs != NOTHING:
        found = (reason for need, reason in NEEDS.items() if getattr(policy.needs, need) is not None)
        return next(found, "needs more of the model than keys, values and attention")
    if policy.merge is not None:
        return "merges entries, and a merged one stands at no single position of its block"
    if policy.prefill != "once":
        return f"was given prefill={policy.prefill!r}; leave it out and give prefill='chunks' of the engine"
    if isinstance(policy.heads, PromptHeadAllocation):
        return "gives heads rules of their own, and a block holds as many entries of each head"
    if policy.protect.prompt:
        return "keeps a whole prompt, whose end a block is not told; give prompt=false, or mark its spans"
    if isinstance(policy.layers, PromptLayers):
        return (
            "shares its budget among layers by the prompt (across=true, where it has that), and a block holds as many "
            "entries of each layer"
        )
    return None
