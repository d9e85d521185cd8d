"""Curriculum from short to long texts: the rows of a training step, and the rule for the next stage.

A model this small finds the induction head on short rows only; once it has it, longer stages come quickly. After the
first stages every other row jumps over positions, so that short rows, which cost little, teach long distances. What is
known least is drawn most. The last part, the polish, mixes all lengths while the learning rate falls to zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from millpond_lab.pond.facts import FAMILIES
from millpond_lab.pond.text import stream
from millpond_lab.train.recall.model import MAX_POSITIONS
from millpond_lab.train.recall.training_rows import SOURCES, TrainingBatch, draw_batch, warm_up_batch

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
