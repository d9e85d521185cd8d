"""One batch from prompts to records: the first pass, the rounds, the scores, and failures that are counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.errors import BudgetError, NumericsError, PoolFullError, UnsupportedModelError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond_lab.evals.candidates.candidate import Candidate, Claims, Restores
from millpond_lab.evals.decoding.batch import BatchReader, EncodedPrompt, EncodedQuestion, Held, PromptBatch, Tokens
from millpond_lab.evals.decoding.greedy_decode import Answer, decode, end_tokens
from millpond_lab.evals.decoding.likelihood import Fidelity, ScoredChoice, choose, compare, token_logprobs
from millpond_lab.evals.decoding.prompt_recording import PromptRecording, PromptRecordings
from millpond_lab.evals.decoding.record import CLAIMED, Record
from millpond_lab.evals.harness.attention_loss import attention_losses, kept_positions
from millpond_lab.evals.task import Task


@dataclass(frozen=True, slots=True)
class QuestionTurn:
    """One question of one row, ready to be answered from the row's cache.

    Attributes:
        held: what the row held before the question was read (in `aware`: before its last token).
        failure: why it was not read; "" if it was.
    """

    prompt: EncodedPrompt
    asked: EncodedQuestion
    held: Held
    failure: str = ""


def rounds(
    readers: Sequence[BatchReader], batch: PromptBatch, limit: int | None
) -> Iterator[list[QuestionTurn | None]]:
    """Ask the questions of a batch whose openings were read: a list with one turn for each row of the readers.

    None stands for a row that is not asked in this round. The caller answers each list before it takes the next;
    with the protocol `turns` what it reads, or leaves pending, stays in the rows.

    Args:
        readers: get the same questions; the first one reports what is held.
        limit: positions of the model.
    """
    held, prompts = readers[0].held(), batch.prompts
    if batch.protocol != "turns":
        rows = [row for row, prompt in enumerate(prompts) for _ in prompt.asked]
        for reader in readers:
            reader.select(rows)
        pairs = [(prompt, asked) for prompt in prompts for asked in prompt.asked]
        yield _ask(readers, pairs, [held[row] for row in rows], limit)
        return
    for index in range(max(len(prompt.asked) for prompt in prompts)):
        each = [(p, p.asked[index]) if index < len(p.asked) else None for p in prompts]
        yield _ask(readers, each, readers[0].held(), limit)


def _ask(
    readers: Sequence[BatchReader],
    pairs: Sequence[tuple[EncodedPrompt, EncodedQuestion] | None],
    held: list[Held],
    limit: int | None,
) -> list[QuestionTurn | None]:
    """Read what leads to the answers, where it fits into the model."""
    first = readers[0]
    turns: list[QuestionTurn | None] = []
    for row, pair in enumerate(pairs):
        if pair is None:
            turns.append(None)
            continue
        prompt, asked = pair
        there = first.seen[row] + len(first.pending[row])
        turns.append(QuestionTurn(prompt, asked, held[row], _failure(asked, there, limit)))
    for reader in readers:
        tokens: list[list[int]] = []
        for row, turn in enumerate(turns):
            if turn is None or turn.failure:
                tokens.append([])
            else:
                tokens.append([*reader.pending[row], *turn.asked.tokens])
                reader.pending[row] = []
        reader.feed(tokens)
    return turns


def _failure(asked: EncodedQuestion, there: int, limit: int | None) -> str:
    """Why a question cannot follow `there` tokens."""
    need = max((len(target) for target in asked.targets), default=1) - 1
    total = there + len(asked.tokens) + need
    if limit is not None and total > limit:
        return f"{total} tokens with the question and what follows are more than the model's {limit} positions"
    return ""


#: What one prompt may fail with while the others continue.
_OWN_FAULT = (BudgetError, PoolFullError, NumericsError, torch.OutOfMemoryError)
_NOTHING = Held(0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One answer with its score, as in `Record`."""

    answer: str = ""
    score: float = 0.0
    weight: float = 1.0
    extra: dict[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Examines one candidate on one task.

    Attributes:
        cell: `Cell.key`. limit: positions of the model; None for no limit.
        recordings: of the first passes, shared with the evaluators of other cells; None: each pass is run here.
    """

    cell: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    task: Task
    candidate: Candidate
    budget: str
    codec: str
    limit: int | None
    recordings: PromptRecordings | None = None

    def examine(self, batch: PromptBatch) -> list[Record]:
        """A record for every question of the batch, in the order of `Batch.names`.

        A batch that cannot be run together is run prompt by prompt; a prompt that fails alone is recorded as a
        failure.
        """
        records: dict[tuple[str, int], Record] = {}
        for prompt in batch.prompts:
            failure = self._misfit(prompt)
            if failure:
                self._record_failure(prompt, failure, records)
        fit = tuple(p for p in batch.prompts if (p.sample.id, p.asked[0].index) not in records)
        if fit:
            self._together(PromptBatch(batch.protocol, batch.kind, fit), records)
        return [records[name] for name in batch.names]

    def _misfit(self, prompt: EncodedPrompt) -> str:
        if not prompt.opening:
            return "there are no tokens before the question, so there is nothing to compress; use --protocol aware"
        if self.limit is not None and prompt.read_before > self.limit:
            return f"a prompt of {prompt.read_before} tokens is longer than the model's {self.limit} positions"
        return ""

    def _together(self, batch: PromptBatch, records: dict[tuple[str, int], Record]) -> None:
        if isinstance(self.candidate, Restores) and len(batch.prompts) > 1:  # a file holds one text
            for alone in batch.alone():
                self._together(alone, records)
            return
        done: dict[tuple[str, int], Record] = {}
        try:
            self._run(batch, done)
            records.update(done)
        except _OWN_FAULT as error:
            if len(batch.prompts) > 1:
                for alone in batch.alone():
                    self._together(alone, records)
                return
            records.update(done)
            self._record_failure(batch.prompts[0], f"{type(error).__name__}: {error}", records)

    def _run(self, batch: PromptBatch, records: dict[tuple[str, int], Record]) -> None:
        openings = [prompt.opening for prompt in batch.prompts]
        with ExitStack() as stack, torch.inference_mode():
            recording = self._recording(openings)
            cache = stack.enter_context(self._open(batch))
            readers = [BatchReader(self.model, cache, openings, recording)]
            losses = self._attention_losses(batch, cache) if batch.kind == "fidelity" else {}
            if batch.kind == "fidelity":
                full = stack.enter_context(compress(self.model, "full"))
                readers.append(BatchReader(self.model, full, openings, recording))
            claimed = {CLAIMED: self.candidate.claims(cache)} if isinstance(self.candidate, Claims) else {}
            if isinstance(self.candidate, Restores):
                restored, claimed[CLAIMED] = self.candidate.restored(self.model, cache, readers[0].ids)
                readers[0].cache = stack.enter_context(restored)
            for reader in readers:
                reader.write([prompt.written for prompt in batch.prompts])
            for turns in rounds(readers, batch, self.limit):
                checked = [None if turn is None else _checked(turn, batch) for turn in turns]
                results = self._results(batch, readers, [None if t is None or t.failure else t for t in checked])
                for turn, result in zip(checked, results, strict=True):
                    if turn is not None:
                        self._record(turn, result or self._zero_result(turn.asked, turn.failure), records)
                        name = turn.prompt.sample.id, turn.asked.index
                        records[name].extra.update(losses.get(name, {}) | claimed)

    def _recording(self, openings: Sequence[Tokens]) -> PromptRecording | None:
        """What is known of the first pass; it is run here if it is not yet."""
        if self.recordings is None:
            return None
        recording = self.recordings.of(openings)
        if recording is not None and not recording.done:
            with compress(self.model, "full") as cache, recording.of(self.model, cache, self.recordings.hidden):
                recording.take(BatchReader(self.model, cache, openings))
        return recording

    def _attention_losses(self, batch: PromptBatch, cache: MillpondCache) -> dict[tuple[str, int], dict[str, float]]:
        """What the outputs of the attention layers lose on each continuation, where the model lets it be known."""
        found: dict[tuple[str, int], dict[str, float]] = {}
        for row, prompt in enumerate(batch.prompts):
            kept = kept_positions(cache, row)
            for asked in prompt.asked:
                follows = (*asked.tokens, *(asked.targets[0] if asked.targets else ()))
                tokens = torch.tensor([*prompt.opening, *follows], device=self.model.device)
                fits = self.limit is None or len(tokens) <= self.limit
                if follows and fits and batch.protocol != "turns" and not prompt.written:
                    with suppress(UnsupportedModelError):
                        losses = attention_losses(self.model, tokens, len(prompt.opening), kept)
                        found[prompt.sample.id, asked.index] = losses.numbers()
        return found

    def _open(self, batch: PromptBatch) -> MillpondCache:
        return self.candidate.open(self.model, self.tokenizer, batch, self.budget, self.codec)

    def _results(
        self, batch: PromptBatch, readers: list[BatchReader], turns: Sequence[QuestionTurn | None]
    ) -> list[EvalResult | None]:
        reader = readers[0]
        asked = [None if turn is None else turn.asked for turn in turns]
        if batch.kind == "generate":
            questions = [None if one is None else one.question for one in asked]
            answers = decode(reader, questions, self.tokenizer, end_tokens(self.model, self.tokenizer), self.limit)
            return [self._answered(o, a) if o and a else None for o, a in zip(asked, answers, strict=True)]
        if batch.kind == "choice":
            return [_chosen(o, c) if o and c else None for o, c in zip(asked, choose(reader, asked), strict=True)]
        targets: list[Tokens] = [() if one is None else one.targets[0] for one in asked]
        if batch.kind == "perplexity":
            return [_surprise(values) if values else None for values in token_logprobs(reader, targets)]
        found = compare(readers[1], reader, targets)
        return [_likeness(f, len(t)) if f else None for f, t in zip(found, targets, strict=True)]

    def _answered(self, asked: EncodedQuestion, answer: Answer) -> EvalResult:
        extra = {"ended": float(answer.ended), "tokens": float(answer.tokens)}
        if answer.cut_short:
            failure = f"the answer did not end within the model's {self.limit} positions ({answer.tokens} tokens)"
            return EvalResult(answer=answer.text, extra=extra, failure=failure)
        return EvalResult(answer.text, float(self.task.score(asked.question, answer.text)), extra=extra)

    def _zero_result(self, asked: EncodedQuestion, failure: str) -> EvalResult:
        """The result of a question that could not be answered: score 0, but no token of a perfect text."""
        weight = {"perplexity": 0.0, "fidelity": float(sum(map(len, asked.targets[:1])))}
        return EvalResult(weight=weight.get(self.task.kind, 1.0), failure=failure)

    def _record_failure(self, prompt: EncodedPrompt, failure: str, records: dict[tuple[str, int], Record]) -> None:
        for asked in prompt.asked:
            if (prompt.sample.id, asked.index) not in records:
                turn = QuestionTurn(prompt, asked, _NOTHING, failure)
                self._record(turn, self._zero_result(asked, failure), records)

    def _record(self, turn: QuestionTurn, result: EvalResult, records: dict[tuple[str, int], Record]) -> None:
        if not math.isfinite(result.score):
            result = self._zero_result(turn.asked, f"the score is {result.score}")
        sample = turn.prompt.sample
        records[sample.id, turn.asked.index] = Record(
            self.cell,
            sample.id,
            turn.asked.index,
            result.answer,
            result.score,
            result.weight,
            prompt_tokens=turn.prompt.read_before + len(turn.asked.tokens),
            kept_share=turn.held.share,
            kv_bytes=turn.held.kv_bytes,
            full_kv_bytes=turn.held.full_kv_bytes,
            bf16_kv_bytes=turn.held.bf16_kv_bytes,
            failure=result.failure,
            facts=dict(sample.facts),
            extra=result.extra,
        )


def _checked(turn: QuestionTurn, batch: PromptBatch) -> QuestionTurn:
    """The turn, failed if what should be fed has no tokens."""
    targets = turn.asked.targets
    if turn.failure or batch.kind == "generate" or (targets and all(targets)):
        return turn
    what = "choice" if batch.kind == "choice" else "reference"
    return QuestionTurn(turn.prompt, turn.asked, turn.held, f"the question has no {what}, or one without tokens")


def _chosen(asked: EncodedQuestion, choice: ScoredChoice) -> EvalResult:
    right = asked.question.right
    extra = {"acc": float(choice.best == right), "acc_norm": float(choice.best_per_character == right)}
    return EvalResult(asked.question.choices[choice.best], extra["acc"], extra=extra)


def _surprise(logprobs: list[float]) -> EvalResult:
    nll = -sum(logprobs) / len(logprobs)
    return EvalResult(score=nll, weight=len(logprobs), extra={"nll": nll})


def _likeness(found: Fidelity, tokens: int) -> EvalResult:
    extra = {"kl": found.kl, "top1": found.agreement, "nll": found.nll}
    return EvalResult(score=found.agreement, weight=tokens, extra=extra)
