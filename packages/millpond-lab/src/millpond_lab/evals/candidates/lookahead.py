"""A run of the full cache ahead of a batch, so that what it will attend to is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.hf.compress import compress
from millpond.hf.model_profile import ModelProfile
from millpond_lab.evals.decoding.attention_recorder import AttentionRecorder, RecordedAttention
from millpond_lab.evals.decoding.batch import EncodedPrompt, EncodedQuestion, PromptBatch
from millpond_lab.evals.decoding.batch_reader import BatchReader
from millpond_lab.evals.decoding.greedy_decode import decode, end_tokens


@dataclass(frozen=True, slots=True)
class LookaheadRun:
    """One way on from a prompt.

    Attributes:
        prompt: index of the prompt in its batch.
        moments: tokens read when the opening, and then each question, had been read: when a method evicts.
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
