"""Next tokens of the answers in a pass: their choice is launched together, and read then or a step later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millpond.engine.completion import CompletionState
from millpond.engine.components import Components
from millpond.engine.request_state import RequestState
from millpond.engine.sampling.sampler import BadLogitsError, Drawn, Sampled
from millpond.kernels.transfers import on_device


@dataclass(slots=True)
class Choices:
    """Next tokens of some answers, which the host has not read.

    Attributes:
        parts: Answers, and the tokens of all of them; several parts where they could not be chosen together.
        failed: Requests for which no choice could be launched; they have ended.
    """

    parts: list[tuple[list[CompletionState], Drawn]] = field(default_factory=list)
    failed: list[RequestState] = field(default_factory=list)

    def newest(self, completions: Sequence[CompletionState]) -> Tensor:
        """Return the tokens of some of the answers, (n,) int64 where the model is."""
        tokens = torch.cat([drawn.tokens for _, drawn in self.parts])
        there = [completion for part, _ in self.parts for completion in part]
        row_of = {completion: row for row, completion in enumerate(there)}
        rows = [row_of[completion] for completion in completions]
        return tokens if rows == list(range(len(there))) else tokens[on_device(torch.tensor(rows), tokens.device)]


class NextTokens:
    """Chooses the next tokens of answers. It ends answers, and retires no request.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: Components) -> None:
        self._counts, self._requests, self._sampler = parts.counts, parts.requests, parts.sampler

    def launch(self, completions: list[CompletionState], logits: Tensor, newest: Tensor | None = None) -> Choices:
        """Launch the choice of the next token of each answer, together where that is possible.

        Args:
            completions: Answers, one per row.
            logits: (n, vocabulary).
            newest: Their newest tokens (n,), if these were not read.
        """
        if not completions:
            return Choices()
        try:
            drawn = self._sampler.launch([completion.key for completion in completions], logits, newest)
            return Choices([(completions, drawn)])
        except Exception as error:
            if len(completions) == 1:
                owner = self._requests.owner(completions[0])
                owner.fail(error)
                return Choices(failed=[owner])
        each = Choices()  # one of them fails, or all do
        for row, completion in enumerate(completions):
            if not completion.finished:  # as it has where its request failed with another answer
                own = slice(row, row + 1)
                alone = self.launch([completion], logits[own], None if newest is None else newest[own])
                each.parts += alone.parts
                each.failed += alone.failed
        return each

    def take(self, choices: Choices) -> None:
        """Read the tokens, and append them to the answers that have not ended.

        Answers without a token to choose end, and requests for which this fails.
        """
        for completions, drawn in choices.parts:
            unfinished = [completion for completion in completions if not completion.finished]
            for completion, sampled in self._read(unfinished, drawn):
                if not completion.finished:
                    self._append(completion, sampled)

    def _append(self, completion: CompletionState, sampled: Sampled) -> None:
        with self._requests.owner(completion).own_work():
            self._counts["generated_tokens"] += 1
            completion.append(sampled)
            if sampled.error is not None:
                raise sampled.error

    def _read(self, completions: list[CompletionState], drawn: Drawn) -> Iterator[tuple[CompletionState, Sampled]]:
        """Yield the next token of each answer, without those that end because there is none."""
        if not completions:
            return
        try:
            sampled = self._sampler.finish(drawn, {completion.key for completion in completions})
        except BadLogitsError as error:
            for completion in completions:
                if completion.key in error.reasons:
                    completion.end("error")
                    self._requests.owner(completion).error = error.reasons[completion.key]
            yield from self._read([one for one in completions if one.key not in error.reasons], drawn)
        except Exception as error:
            if len(completions) == 1:
                self._requests.owner(completions[0]).fail(error)
                return
            for completion in completions:  # one of them fails, or all do
                yield from self._read([completion], drawn)
        else:
            yield from zip(completions, sampled, strict=True)
