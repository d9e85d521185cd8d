"""Declared needs of a policy, so that nothing outside `millpond.policy` depends on its class."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.policy.needs.block_lookup import BlockLookup
from millpond.policy.needs.head_rules import HeadRules
from millpond.policy.needs.prompt_patterns import PromptPatterns


@dataclass(frozen=True, slots=True)
class PromptRepeat:
    """The model says each prompt or turn again before there is a plan.

    Attributes:
        ids: what asks for the repetition, as token ids; None until a tokenizer has spelled it.
        chunk: tokens that are repeated in one pass.
    """

    ids: tuple[int, ...] | None
    chunk: int


@dataclass(frozen=True, slots=True)
class Entropies:
    """Scores are -log P of each token in the model's own predictions.

    Attributes:
        decay: factor on every stored score when another round of a dialogue begins.
    """

    decay: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a policy needs that the keys, values and attention of one layer do not give. The default: nothing.

    Attributes:
        whole_prompt: a prompt is read in one pass, because where it is cut would change the result.
        uncut: a caller may not cut a prompt either; `whole_prompt` goes with it.
        token_ids: the ids of all tokens that were read.
        entropies: the model's predictions for all tokens.
        prompt_repeat: a second reading of each prompt.
        head_rules: a rule of its own for each KV head, and the queries of the prompt.
        block_lookup: everything is stored, and queries look blocks of it up.
        prompt_patterns: everything is stored, and the queries of a prompt attend to patterns of it.
    """

    whole_prompt: bool = False
    uncut: bool = False
    token_ids: bool = False
    entropies: Entropies | None = None
    prompt_repeat: PromptRepeat | None = None
    head_rules: HeadRules | None = None
    block_lookup: BlockLookup | None = None
    prompt_patterns: PromptPatterns | None = None


#: What most policies need.
NOTHING = Needs()
