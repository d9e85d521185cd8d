"""Runs batches of tokenized prompts through one method, for adapters of other harnesses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond_lab.evals.candidates.candidate import Compressed
from millpond_lab.evals.decoding.batch import (
    BatchReader,
    EncodedPrompt,
    EncodedQuestion,
    Held,
    PromptBatch,
    Tokens,
    batches,
)
from millpond_lab.evals.decoding.greedy_decode import Answer, decode, end_tokens
from millpond_lab.evals.decoding.likelihood import forced
from millpond_lab.evals.harness.evaluator import QuestionTurn, rounds
from millpond_lab.evals.sample import Question, Sample


@dataclass(frozen=True, slots=True)
class Fed:
    """A continuation that was fed token by token: its log-probability in nats, and whether it is the greedy one."""

    logprob: float
    is_greedy: bool


@dataclass
class PromptReader:
    """Runs one method over prompts, context and question together (the protocol `aware`).

    Attributes:
        codec: of the entries. size: sequences at once. limit: positions of the model; None for no limit.
        held: what each prompt held when its answer, or its continuations, began.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    candidate: Compressed
    codec: str
    size: int
    limit: int | None
    held: list[Held] = field(default_factory=list)

    def feed(self, prompts: Sequence[EncodedPrompt], budget: str) -> Iterator[list[Fed]]:
        """For each prompt, what became of every target of its question."""
        for batch in batches(prompts, "choice", "aware", self.size):
            with self._read(batch, budget) as (reader, turns):
                targets = [turn.asked.targets for turn in turns]
                reader.select([row for row, own in enumerate(targets) for _ in own])
                fed = _fed(reader, [target for own in targets for target in own])
            for own in targets:
                yield fed[: len(own)]
                fed = fed[len(own) :]

    def answer(self, prompts: Sequence[EncodedPrompt], budget: str) -> Iterator[Answer]:
        """For each prompt, the decoded answer to its question."""
        for batch in batches(prompts, "generate", "aware", self.size):
            with self._read(batch, budget) as (reader, turns):
                questions = [turn.asked.question for turn in turns]
                eos = end_tokens(self.model, self.tokenizer)
                answers = decode(reader, questions, self.tokenizer, eos, self.limit)
            yield from (answer for answer in answers if answer is not None)

    @contextmanager
    def _read(self, batch: PromptBatch, budget: str) -> Iterator[tuple[BatchReader, list[QuestionTurn]]]:
        """A batch read up to where the answers begin."""
        opened = self.candidate.open(self.model, self.tokenizer, batch, budget, self.codec)
        with opened as cache, torch.inference_mode():
            reader = BatchReader(self.model, cache, [prompt.opening for prompt in batch.prompts])
            for asked in rounds([reader], batch, self.limit):
                turns = [turn for turn in asked if turn is not None]
                assert not any(turn.failure for turn in turns), "prompts are measured before they are read"
                self.held += [turn.held for turn in turns]
                yield reader, turns


def prompt_of(context: Sequence[int], question: Question, targets: Sequence[Sequence[int]] = ()) -> EncodedPrompt:
    """A prompt in the protocol `aware`: all but the last token is read at once, then the method evicts."""
    cut = max(len(context) - 1, 1)
    asked = EncodedQuestion(0, question, tuple(context[cut:]), tuple(tuple(target) for target in targets))
    return EncodedPrompt(Sample("request", "", (question,)), tuple(context[:cut]), (asked,))


def _fed(reader: BatchReader, targets: Sequence[Tokens]) -> list[Fed]:
    sums, greedy = [0.0] * len(targets), [True] * len(targets)
    for rows, tokens in forced([reader], targets):
        logprobs = torch.log_softmax(reader.logits[rows], -1)
        best = logprobs.argmax(-1).tolist()
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            sums[row] += float(logprobs[place, token])
            greedy[row] &= best[place] == token
    return [Fed(total, found) for total, found in zip(sums, greedy, strict=True)]
