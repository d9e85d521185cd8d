"""Likelihoods by true decoding: every token of a continuation is one step of the evicting cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from millpond_lab.evals.decoding.batch import BatchReader, EncodedQuestion, Tokens


class Predictor(Protocol):
    """What is fed tokens and predicts, see `BatchReader`; or gives what another has predicted, see `RecordedLogits`."""

    pending: list[list[int]]

    @property
    def logits(self) -> Tensor:
        """(rows, vocabulary), after each row's newest token."""
        ...

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """Read new tokens of each row."""
        ...


@dataclass(frozen=True, slots=True)
class ScoredChoice:
    """The log-probability of each choice, in nats, and which is the likeliest, in all and per character."""

    logprobs: tuple[float, ...]
    best: int
    best_per_character: int


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How near a row's predictions are to those of the full cache on the same tokens, means over tokens.

    Attributes:
        kl: KL(full || row) in nats. agreement: share of tokens for which both predict the same. nll: as the row sees
            the text.
    """

    kl: float
    agreement: float
    nll: float


def forced(readers: Sequence[Predictor], targets: Sequence[Tokens]) -> Iterator[tuple[list[int], list[int]]]:
    """Feed each row its target, one token per step; before each step yield (rows, their next tokens).

    While the caller looks, `logits` of every reader predict those tokens. A target's last token is not read: it is
    left pending.
    """
    for place in range(max(map(len, targets), default=0)):
        rows = [row for row, target in enumerate(targets) if place < len(target)]
        yield rows, [targets[row][place] for row in rows]
        tokens = [target[place : place + 1] if place + 1 < len(target) else () for target in targets]
        for reader in readers:
            reader.feed(tokens)
    for reader in readers:
        for row, target in enumerate(targets):
            if target:
                reader.pending[row] = list(target[-1:])


def token_logprobs(reader: BatchReader, targets: Sequence[Tokens]) -> list[list[float]]:
    """The log-probability of every token of each row's target, in nats."""
    found: list[list[float]] = [[] for _ in targets]
    for rows, tokens in forced([reader], targets):
        for row, value in zip(rows, _picked(_log_softmax(reader, rows), tokens), strict=True):
            found[row].append(value)
    return found


def choose(reader: BatchReader, asked: Sequence[EncodedQuestion | None]) -> list[ScoredChoice | None]:
    """The likeliest choice of the question that each row has just read; None where nothing is asked.

    Each choice continues from its own copy of the row. Afterwards the rows are as they were, each with its likeliest
    choice read. Equal choices: the first one.
    """
    targets = [one.targets if one is not None else ((),) for one in asked]
    reader.select([row for row, own in enumerate(targets) for _ in own])
    sums = [sum(values) for values in token_logprobs(reader, [target for own in targets for target in own])]
    choices: list[ScoredChoice | None] = []
    stay, begin = [], 0
    for one, own in zip(asked, targets, strict=True):
        values = sums[begin : begin + len(own)]
        best = _argmax(values)
        stay.append(begin + best)
        begin += len(own)
        choices.append(None if one is None else ScoredChoice(tuple(values), best, _argmax(_per_character(one, values))))
    reader.select(stay)
    return choices


def compare(full: Predictor, reader: Predictor, targets: Sequence[Tokens]) -> list[Fidelity | None]:
    """Both readers step through each row's target; None where it is empty."""
    kl: list[list[float]] = [[] for _ in targets]
    same: list[list[bool]] = [[] for _ in targets]
    nll: list[list[float]] = [[] for _ in targets]
    for rows, tokens in forced([full, reader], targets):
        p, q = _log_softmax(full, rows), _log_softmax(reader, rows)
        divergence = (p.exp() * (p - q)).sum(-1).tolist()
        agreed = (p.argmax(-1) == q.argmax(-1)).tolist()
        for row, d, a, value in zip(rows, divergence, agreed, _picked(q, tokens), strict=True):
            kl[row].append(d)
            same[row].append(a)
            nll[row].append(-value)
    return [
        Fidelity(_mean(kl[row]), _mean(same[row]), _mean(nll[row])) if target else None
        for row, target in enumerate(targets)
    ]


def _log_softmax(reader: Predictor, rows: list[int]) -> Tensor:
    return torch.log_softmax(reader.logits[rows], -1)


def _picked(logprobs: Tensor, tokens: list[int]) -> list[float]:
    """Each row's value of its token."""
    index = torch.tensor(tokens, device=logprobs.device)[:, None]
    values: list[float] = logprobs.gather(1, index)[:, 0].tolist()
    return values


def _per_character(asked: EncodedQuestion, values: Sequence[float]) -> list[float]:
    """Log-probabilities over the characters of the choices, without their leading space."""
    texts = asked.question.choices
    return [value / max(1, len(text.lstrip())) for value, text in zip(values, texts, strict=True)]


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class RecordedLogits:
    """What a reader predicted while it was fed its targets; feeding it again goes to the next predictions.

    Attributes:
        logits: (rows, vocabulary), as of `BatchReader`. pending: tokens that were decided but not read.
    """

    def __init__(self, reader: BatchReader, targets: Sequence[Tokens]) -> None:
        self._steps = [reader.logits.clone() for _ in forced([reader], targets)]
        self.pending: list[list[int]] = [[] for _ in targets]
        self.rewind()

    def rewind(self) -> None:
        """Go back to the first predictions."""
        self._at = 0

    @property
    def logits(self) -> Tensor:
        """Those of the step that was reached."""
        return self._steps[self._at] if self._steps else torch.empty(0)

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """Go to the next predictions."""
        self._at = min(self._at + 1, len(self._steps) - 1)
