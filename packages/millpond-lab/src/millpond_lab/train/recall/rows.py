"""Training rows of `pond-recall`, and the curriculum from short to long texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond_lab.pond import facts as f
from millpond_lab.pond import words as w
from millpond_lab.pond.facts import FAMILIES, FILLERS, FactQuestion, Facts, Words, hide, stream
from millpond_lab.pond.words import ID, VOCABULARY, ids
from millpond_lab.train.recall.model import MAX_POSITIONS

#: Kinds of facts; pairs answer questions of two families.
SOURCES = ("pairs", "retold", "manifold", "chains", "passages", "frequent", "common")
#: Questions of one family in a row at most; 8 of the others.
ASKED_MOST = {"recall": 32, "overwritten": 16, "multivalue": 16, "multiquery": 8, "tracking": 12}
ASKED_WORDS = (24, 260)  # of questions in a row, about: in a short one, and in a long one
NO_FAMILY = -1
WARM_UP = -2  # the family of what a warm-up row repeats
COPY_LENGTHS = (5, 60)  # words in the text that a warm-up row repeats
COPY_GAPS = (0, 20)  # words between the text and its repetition
VALUES = 4  # things stated about one name in a text, all of which hold
JUMPS_MOST = 8  # places of a text at which its positions jump
NO_WORD = -1
_FILLER = np.array(ids(w.FILLER))

#: tokens, positions, family, supervised, each (L,), and accepted (supervised, VALUES): see Batch
Row = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class TrainingBatch(NamedTuple):
    """Rows for next-token prediction, with the places where the loss is taken."""

    tokens: Tensor  # (B, L) int64
    positions: Tensor  # (B, L) int64, rising
    family: Tensor  # (B, L) int64: >= 0 where the *next* token is a word that counts, FAMILIES by number; else < 0
    supervised: Tensor  # (B, L) bool: where the next token is a target (answers with their <eos>)
    accepted: Tensor  # (places supervised, VALUES) int64: the tokens that are right there; NO_WORD fills up


def draw_batch(
    seed: int,
    step: int,
    *,
    length: int,
    tokens: int,
    weights: np.ndarray,
    positions: int | None = None,
    name: str = "train",
) -> TrainingBatch:
    """About `tokens` tokens of rows whose text has `length` words.

    Args:
        seed, step: name the batch.
        length: words of the text of each row.
        tokens: of the whole batch, about.
        weights: (SOURCES,) how often each kind of fact is drawn.
        positions: the model's limit; every other row then jumps over positions between its facts, so that a short
            row teaches long distances. None: no row jumps.
        name: of the random stream.
    """
    rng = stream("pond", name, seed, step)
    rows: list[Row] = []
    size = 0
    while not rows or size + size // len(rows) <= tokens:
        rows.append(_row(rng, length, weights, positions))
        size += len(rows[-1][0])
    return _stack(rows)


def warm_up_batch(seed: int, step: int, *, tokens: int) -> TrainingBatch:
    """Random text, a gap, the same text again; the repetition is supervised.

    Length and gap differ from row to row: one fixed distance would teach a trick of positions instead of an
    induction head.
    """
    rng = stream("pond", "warm-up", seed, step)
    rows: list[Row] = []
    size = 0
    while size < tokens:
        length, gap = (int(rng.integers(low, high + 1)) for low, high in (COPY_LENGTHS, COPY_GAPS))
        text = rng.integers(len(w.MARKS), len(VOCABULARY), length)
        between = rng.integers(len(w.MARKS), len(VOCABULARY), gap)
        tokens_ = np.concatenate([[ID[w.BOS]], text, between, text])
        family = np.full(len(tokens_), NO_FAMILY)
        family[-length:-1] = WARM_UP
        accepted = np.full((length - 1, VALUES), NO_WORD)
        accepted[:, 0] = text[1:]
        rows.append((tokens_, np.arange(len(tokens_)), family, family == WARM_UP, accepted))
        size += len(tokens_)
    return _stack(rows)


def _row(rng: np.random.Generator, length: int, weights: np.ndarray, positions: int | None) -> Row:
    """One row whose text has `length` words."""
    told, asked = [], []
    for facts in _facts(rng, length, weights):
        told += facts.threads
        asked += facts.asked
    kind = FILLERS[int(rng.choice(len(FILLERS), p=(0.5, 0.35, 0.15)))]
    text = hide(rng, Facts(told, []), length, kind)
    parts, family, supervised = [np.array([ID[w.BOS]]), text], [np.full(length + 1, NO_FAMILY)], [np.zeros(length + 1)]
    accepted: list[tuple[int, ...]] = []
    for question in _chosen(rng, asked, min(max(ASKED_WORDS[0], length // 2), ASKED_WORDS[1])):
        line = np.array(question.question + question.answer)
        mark = np.full(len(line), NO_FAMILY)
        begin = len(question.question) - 1
        answer = mark[begin : begin + len(question.answer)]
        answer[np.array(question.scored)] = FAMILIES.index(question.family)
        target = np.zeros(len(line))
        target[begin : begin + len(question.answer)] = 1
        parts.append(line)
        family.append(mark)
        supervised.append(target)
        accepted += [question.accepted(place, question.answer[:place]) for place in range(len(question.answer))]
    tokens = np.concatenate(parts)
    right = np.array([words + (NO_WORD,) * (VALUES - len(words)) for words in accepted])
    return tokens, _positions(rng, tokens, positions), np.concatenate(family), np.concatenate(supervised) > 0, right


def _positions(rng: np.random.Generator, tokens: np.ndarray, limit: int | None) -> np.ndarray:
    """Positions (L,) of a row: one after another, or with jumps between filler words, below `limit`."""
    steps = np.ones(len(tokens), dtype=np.int64)
    steps[0] = 0
    filler = np.isin(tokens, _FILLER)
    places = np.flatnonzero(filler[1:] & filler[:-1]) + 1
    if limit is not None and len(places) and limit > len(tokens) and rng.random() < 0.5:
        room = int(rng.integers(limit - len(tokens) + 1))
        count = int(rng.integers(1, JUMPS_MOST + 1))
        shares = np.diff(np.sort(rng.integers(0, room + 1, count)), prepend=0)
        np.add.at(steps, rng.choice(places, count), shares)
    return np.cumsum(steps)


def _facts(rng: np.random.Generator, length: int, weights: np.ndarray) -> list[Facts]:
    """Facts of one to four kinds that together fill at most half of the text, and at most some 400 words."""
    kinds = 1 if length <= 48 else 2 if length <= 256 else int(rng.integers(2, 5))
    room = min(length // 2, 420) // kinds
    chosen = rng.choice(len(SOURCES), kinds, replace=False, p=weights / weights.sum())
    draw = Words(rng)
    return [facts_of(draw, SOURCES[place], room) for place in chosen]


def facts_of(draw: Words, source: str, room: int) -> Facts:
    """Facts of one kind of `SOURCES` in at most `room` words, or the least that this kind takes."""
    rng = draw.rng

    def up_to(most: int) -> int:
        return int(rng.integers(max(1, most // 3), max(1, most) + 1))

    if source == "pairs":
        return f.pairs(draw, min(64, up_to(room // 2)))
    if source == "retold":
        return f.retold(draw, min(24, up_to(room // 5)))
    if source == "manifold":
        return f.manifold(draw, min(16, up_to(room // (2 * VALUES))), VALUES)
    if source == "chains":
        hops = int(rng.integers(2, 5)) if room >= 12 else 2
        return f.chains(draw, min(12, up_to(room // (3 * hops))), hops)
    if source == "passages":
        words = int(rng.integers(4, 9)) if room >= 11 else 4
        return f.passages(draw, min(8, up_to(room // (words + 3))), words)
    if source == "frequent":
        return f.frequent(draw, max(12, min(90, up_to(room))))
    return f.common(draw, max(12, min(60, up_to(room))))


def _chosen(rng: np.random.Generator, asked: list[FactQuestion], room: int) -> list[FactQuestion]:
    """The questions in random order, not too many of one family, about `room` words in all."""
    count: dict[str, int] = {}
    chosen = []
    for place in rng.permutation(len(asked)):
        question = asked[int(place)]
        count[question.family] = count.get(question.family, 0) + 1
        if count[question.family] <= ASKED_MOST.get(question.family, 8) and room > 0:
            chosen.append(question)
            room -= len(question.question) + len(question.answer)
    return chosen


def _stack(rows: list[Row]) -> TrainingBatch:
    """Rows of different lengths, filled up at the end, where no target is."""
    width = max(len(row[0]) for row in rows)
    tokens = torch.full((len(rows), width), ID[w.PAD])
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    family = torch.full((len(rows), width), NO_FAMILY)
    supervised = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        # a word is predicted at the place before it: family and supervised already stand there
        for whole, part in zip((tokens, positions, family, supervised), row, strict=False):
            whole[place, : len(part)] = torch.from_numpy(part)
    accepted = torch.from_numpy(np.concatenate([row[-1] for row in rows]))
    return TrainingBatch(tokens, positions, family, supervised, accepted)


#: Words of a text, stage by stage.
LENGTHS = (32, 64, 128, 256, 512, 1024)
#: Words of a text in the polish, and how often; the longest leaves room for questions in 8,192.
POLISH = {64: 0.05, 128: 0.05, 256: 0.05, 512: 0.1, 1024: 0.15, 2048: 0.15, 4096: 0.2, 7900: 0.25}
WARM_UP_STAGES = 2  # the first stages, in which every other batch is a warm-up
PASS_MEAN, PASS_LEAST = (0.9, 0.96), (0.6, 0.85)  # running accuracy that opens the next stage, first stages and later
PATIENCE = 200  # steps after which a later stage opens the next anyway
MEMORY = 0.9  # weight of the past in the running accuracy
ALWAYS = 0.05  # the share with which a kind of fact is drawn, however well it is known
#: The kinds that are drawn more often than the others in the polish: those whose last errors go last.
EMPHASIS = {"manifold": 3.0, "frequent": 8.0}

#: The families of questions that each kind of fact answers.
ANSWERS = {
    "pairs": ("recall", "multiquery"),
    "retold": ("overwritten",),
    "manifold": ("multivalue",),
    "chains": ("tracking",),
    "passages": ("copy",),
    "frequent": ("frequent",),
    "common": ("common",),
}


@dataclass
class Curriculum:
    """Where training stands. `stage == len(LENGTHS)` is the polish.

    Attributes:
        accuracy: running share of right words per family. since: steps in this stage. polished: steps of polish.
    """

    stage: int = 0
    accuracy: list[float] = field(default_factory=lambda: [0.0] * len(FAMILIES))
    since: int = 0
    polished: int = 0

    @property
    def polishing(self) -> bool:
        """Whether every stage has been passed."""
        return self.stage == len(LENGTHS)

    @property
    def mean(self) -> float:
        """Mean of the running accuracies."""
        return sum(self.accuracy) / len(self.accuracy)

    def is_warm_up(self, step: int) -> bool:
        """Whether this step repeats random text: every other one of the first stages."""
        return self.stage < WARM_UP_STAGES and step % 2 == 1

    def batch(self, *, seed: int, step: int, tokens: int) -> TrainingBatch:
        """The batch of one step: a function of the arguments and of where training stands."""
        if self.is_warm_up(step):
            return warm_up_batch(seed, step, tokens=tokens)
        if self.polishing:
            rng = stream("pond", "length", seed, step)
            length = int(rng.choice(list(POLISH), p=list(POLISH.values())))
        else:
            length = LENGTHS[self.stage]
        jump = MAX_POSITIONS if self.stage >= WARM_UP_STAGES else None
        return draw_batch(seed, step, length=length, tokens=tokens, weights=self._weights(), positions=jump)

    def _weights(self) -> np.ndarray:
        known = dict(zip(FAMILIES, self.accuracy, strict=True))
        unknown = [1 + ALWAYS - np.mean([known[name] for name in ANSWERS[source]]) for source in SOURCES]
        more = [EMPHASIS.get(source, 1.0) if self.polishing else 1.0 for source in SOURCES]
        return np.array(unknown) * more

    def note(self, right: dict[int, float]) -> None:
        """Take in the share of right words per family of one step; may open the next stage."""
        for family, share in right.items():
            self.accuracy[family] = MEMORY * self.accuracy[family] + (1 - MEMORY) * share
        self.since += 1
        later = self.stage >= WARM_UP_STAGES
        passed = self.mean >= PASS_MEAN[later] and min(self.accuracy) >= PASS_LEAST[later]
        if not self.polishing and (passed or (self.since >= PATIENCE and later)):
            self.stage, self.since = self.stage + 1, 0
            self.accuracy = [MEMORY * share for share in self.accuracy]  # the next stage has to show it again

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; `Curriculum(**state)` restores it."""
        return asdict(self)
