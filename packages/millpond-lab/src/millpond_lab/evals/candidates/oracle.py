"""The upper bound of eviction, which knows what the full cache will attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.codec import resolve
from millpond.errors import CacheMismatchError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.model_profile import ModelProfile
from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.head_allocation import Ada, Uniform
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View
from millpond_lab.evals.candidates.candidate import DEFAULT_BUDGET, Candidate, candidate
from millpond_lab.evals.decoding.attention_recorder import AttentionRecorder, RecordedAttention
from millpond_lab.evals.decoding.batch import BatchReader, EncodedPrompt, EncodedQuestion, PromptBatch
from millpond_lab.evals.decoding.greedy_decode import decode, end_tokens


@dataclass(frozen=True, slots=True)
class LookaheadRun:
    """One way on from a prompt.

    Attributes:
        prompt: index of the prompt in its batch.
        moments: tokens read when the opening, what is written behind it, and then each question, had been read.
        traffic: of each layer.
    """

    prompt: int
    moments: tuple[int, ...]
    traffic: tuple[RecordedAttention, ...]


def run_ahead(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, codec: str, every_query: bool
) -> list[LookaheadRun]:
    """Run the full cache over each prompt and what follows: a course for each question, or for each row of turns.

    What follows is the question, and then the reference, the right choice, or where an answer is decoded the full
    cache's own greedy one.

    Args:
        every_query: write down the openings' queries too.
    """
    rows = [(index, asked) for index, prompt in enumerate(batch.prompts) for asked in _courses(prompt, batch)]
    prompts = [batch.prompts[index] for index, _ in rows]
    limit = ModelProfile.of(model).position_limit
    with torch.inference_mode(), compress(model, "full", codec=codec) as cache:
        tap = AttentionRecorder(cache, asking=every_query)
        reader = BatchReader(model, cache, [prompt.opening for prompt in prompts])
        moments = [[seen] for seen in reader.seen]
        tap.asking = True
        reader.write([prompt.written for prompt in prompts])
        for row, prompt in enumerate(prompts):
            if prompt.written:
                moments[row].append(reader.seen[row])
        for turn in range(max(len(asked) for _, asked in rows)):
            now = [asked[turn] if turn < len(asked) else None for _, asked in rows]
            now = [one if _fits(one, reader, row, limit) else None for row, one in enumerate(now)]
            _ask(reader, now)
            for row, seen in enumerate(reader.seen):
                moments[row].append(seen)
            _go_on(reader, now, model, tokenizer, limit)
        return [
            LookaheadRun(index, tuple(moments[row]), tuple(tap.traffic(layer, row) for layer in tap.layers))
            for row, (index, _) in enumerate(rows)
        ]


def _courses(prompt: EncodedPrompt, batch: PromptBatch) -> list[tuple[EncodedQuestion, ...]]:
    return [prompt.asked] if batch.protocol == "turns" else [(asked,) for asked in prompt.asked]


def _target(asked: EncodedQuestion) -> tuple[int, ...]:
    """What is fed after the question; empty where an answer is decoded."""
    right = asked.question.right if len(asked.targets) > 1 else 0
    return asked.targets[right] if asked.targets else ()


def _fits(asked: EncodedQuestion | None, reader: BatchReader, row: int, limit: int | None) -> bool:
    """Whether there are positions for the question and what is fed after it; else it will not be asked at all."""
    if asked is None or limit is None:
        return asked is not None
    there = reader.seen[row] + len(reader.pending[row]) + len(asked.tokens)
    return there + max((len(target) for target in asked.targets), default=1) - 1 <= limit


def _ask(reader: BatchReader, asked: Sequence[EncodedQuestion | None]) -> None:
    tokens = [[] if one is None else [*reader.pending[row], *one.tokens] for row, one in enumerate(asked)]
    for row, one in enumerate(asked):
        if one is not None:
            reader.pending[row] = []
    reader.feed(tokens)


def _go_on(
    reader: BatchReader,
    asked: Sequence[EncodedQuestion | None],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
) -> None:
    """Read what follows the questions; the last token of it is left pending, as no answer depends on its query."""
    targets = [() if one is None else _target(one) for one in asked]
    for row, target in enumerate(targets):
        if target:
            reader.pending[row] = list(target[-1:])
    reader.feed([target[:-1] for target in targets])
    open_ended = [None if one is None or one.targets else one.question for one in asked]
    if any(open_ended):
        decode(reader, open_ended, tokenizer, end_tokens(model, tokenizer), limit)


def later_attention(courses: Sequence[LookaheadRun], layer: int, every_query: bool) -> dict[int, Tensor]:
    """{moment: (H, n) float32}: what the queries after each moment pay to each position, over all courses of a prompt.

    Courses that part at their questions are summed. With `every_query` the queries before the moment count too.
    """
    tables: dict[int, Tensor] = {}
    for course in courses:
        traffic = course.traffic[layer]
        since = {moment: 0 if every_query else moment for moment in course.moments}
        received = {first: traffic.received(first) for first in set(since.values())}
        for moment, first in since.items():
            mass = received[first]
            tables[moment] = _sum(tables[moment], mass) if moment in tables else mass
    return tables


def _sum(a: Tensor, b: Tensor) -> Tensor:
    width = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (a, b))
    return a + b


#: (layer, sequence, seen) -> (H, n) numbers by position, for a plan after `seen` tokens of that sequence of the batch.
Values = Callable[[int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class PrecomputedScore:
    """s_j = a given number for position j of each KV head; positions that none was given for stay before all others.

    Example:
        >>> table = torch.tensor([[0.1, 0.7, 0.2]])
        >>> view = View(torch.tensor([[0, 1, 2, 3]]), None, seen=4, layer=0)
        >>> PrecomputedScore(lambda layer, sequence, seen: table).score(view, 0).tolist()[0][1:]
        [0.699999988079071, 0.20000000298023224, inf]
    """

    values: Values
    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        """
        Raises:
            CacheMismatchError: the numbers are of another number of KV heads.
        """
        table = self.values(view.layer, view.sequence, view.seen).to(view.positions.device)
        if len(table) != len(view.positions):
            raise CacheMismatchError(
                f"layer {view.layer} has {len(view.positions)} KV heads, the given scores are of {len(table)}"
            )
        table = torch.cat([table, table.new_full((len(table), 1), float("inf"))], 1)
        return table.gather(1, view.positions.long().clamp(0, table.shape[1] - 1))


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
