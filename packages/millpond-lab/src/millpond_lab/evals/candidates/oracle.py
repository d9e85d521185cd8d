"""The upper bound of eviction, which knows what the full cache will attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.codec import resolve
from millpond.errors import CacheMismatchError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.policy.head_allocation import Ada, Uniform
from millpond.policy.policy import Policy
from millpond_lab.evals.candidates.candidate import DEFAULT_BUDGET, Candidate, candidate
from millpond_lab.evals.candidates.lookahead import later_attention, run_ahead
from millpond_lab.evals.candidates.precomputed import PrecomputedScore
from millpond_lab.evals.decoding.batch import PromptBatch

#: (layer, sequence) -> {moment: (H, n)}, see `later_attention`.
Tables = dict[tuple[int, int], dict[int, Tensor]]


@dataclass(frozen=True, slots=True)
class Oracle:
    """See `oracle`."""

    statistics: Literal["later", "all"] = "later"
    heads: Literal["uniform", "ada"] = "uniform"
    decode: Literal["grow", "evict"] = "grow"

    @property
    def keeps_all(self) -> bool:
        return False

    @property
    def default_budget(self) -> str:
        return DEFAULT_BUDGET

    def check(self, budget: str, codec: str) -> None:
        resolve(codec)
        Budget.parse(budget or DEFAULT_BUDGET)

    def open(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, budget: str, codec: str
    ) -> MillpondCache:
        tables = foresee(model, tokenizer, batch, codec, self.statistics)
        return compress(model, self.policy(tables), budget or None, codec)

    def policy(self, tables: Tables) -> Policy:
        """Keep what the tables say, no matter where it lies."""
        return Policy(
            score=given(tables),
            heads=Ada(alpha=0.0) if self.heads == "ada" else Uniform(),
            every_step=self.decode == "evict",
        )


def foresee(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: PromptBatch,
    codec: str = "auto",
    statistics: Literal["later", "all"] = "later",
) -> Tables:
    """What a full cache's queries after each moment attend to, for each layer and each prompt of the batch."""
    every = statistics == "all"
    courses = run_ahead(model, tokenizer, batch, codec, every)
    return {
        (layer, prompt): later_attention([c for c in courses if c.prompt == prompt], layer, every)
        for prompt in range(len(batch.prompts))
        for layer in range(len(courses[0].traffic))
    }


def given(tables: Tables) -> PrecomputedScore:
    """The score of an entry: its number in the table of the last moment that has come."""

    def values(layer: int, sequence: int, seen: int) -> Tensor:
        if (layer, sequence) not in tables:
            raise CacheMismatchError(
                f"the oracle looked ahead for {1 + max(s for _, s in tables)} prompts and "
                f"{1 + max(n for n, _ in tables)} layers; layer {layer} of prompt {sequence} is not among them"
            )
        moments = tables[layer, sequence]
        return moments[max((m for m in moments if m <= seen), default=min(moments))]

    return PrecomputedScore(values)


@candidate("oracle")
def oracle(
    statistics: Annotated[
        Literal["later", "all"], "sum over the queries after the eviction, or over all of them (H2O, figure 2d: global)"
    ] = "later",
    heads: Annotated[
        Literal["uniform", "ada"], "every KV head keeps as many, or the heads of a layer compete as in Ada-KV"
    ] = "uniform",
    decode: Annotated[
        Literal["grow", "evict"], "while decoding: grow, or evict at each step by the same numbers (slow)"
    ] = "grow",
) -> Candidate:
    """Keep what the full cache attends to most after the eviction: the upper bound, not a method.

    The full cache runs first, over the prompt and what follows: the question, then the reference, the right choice or
    its own greedy answer. With A its attention and t the moment of the eviction, the score of entry j is
    s_j = sum_{i >= t} sum_h A_ij over the query heads h of a group, float32. Among all sets of one size for each
    KV head (of one total for each layer, with heads=ada), the kept one holds most of that attention. No sinks and no
    recent entries are protected. Where a question is read after the context was compressed, the moment after it has
    numbers of its own; where one compressed context serves several questions, their numbers are summed.
    """
    return Oracle(statistics, heads, decode)
