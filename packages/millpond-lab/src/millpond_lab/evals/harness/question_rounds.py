"""Rounds of questions: the question of each row in each round, by protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millpond_lab.evals.decoding.batch import EncodedPrompt, EncodedQuestion, PromptBatch
from millpond_lab.evals.decoding.batch_reader import BatchReader, Held


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
