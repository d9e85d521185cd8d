"""From short to long: which rows a training step sees, and when it moves on.

A model this small finds the induction head on short rows only; once it has it, each longer stage takes some
fifty steps. The last part, the polish, mixes all stages while the learning rate falls to zero.
"""

from dataclasses import asdict, dataclass

import torch

from millpond.train.recall_data import Batch, RecallShape, copy_batch, recall_batch, stream

STAGES = (
    RecallShape(4, 16),
    RecallShape(8, 32),
    RecallShape(12, 64),
    RecallShape(16, 128),
    RecallShape(16, 256),
    RecallShape(24, 512),
    RecallShape(32, 1024),
    RecallShape(32, 2048),
    RecallShape(32, 3968),  # with its questions just inside 4,096 positions
)
COPY_STAGES = 2  # the first stages, in which every other batch is a copy warm-up
COPY_ROW_LEN = 141
PASS_RECALL = 0.96  # running recall that opens the next stage
RECALL_MEMORY = 0.9  # weight of the past in the running recall


@dataclass
class Curriculum:
    """Where training stands. `stage == len(STAGES)` is the polish."""

    stage: int = 0
    recall: float = 0.0  # running, of the current stage
    polished: int = 0  # steps of polish done

    @property
    def polishing(self) -> bool:
        """Whether every stage has been passed."""
        return self.stage == len(STAGES)

    def note(self, recall: float) -> None:
        """Take in the recall of one recall batch, 0 to 1; may open the next stage."""
        self.recall = RECALL_MEMORY * self.recall + (1 - RECALL_MEMORY) * recall
        if not self.polishing and self.recall >= PASS_RECALL:
            self.stage, self.recall = self.stage + 1, 0.0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; `Curriculum(**state)` restores it."""
        return asdict(self)


def is_copy_step(curriculum: Curriculum, step: int) -> bool:
    """Whether this step is a copy warm-up: every other one, until the first stages are passed."""
    return curriculum.stage < COPY_STAGES and step % 2 == 1


def draw_batch(curriculum: Curriculum, *, seed: int, step: int, tokens: int) -> Batch:
    """The batch of one step, about `tokens` tokens: a function of its arguments only."""
    rng = stream("train", seed, step)
    if is_copy_step(curriculum, step):
        return copy_batch(max(1, tokens // COPY_ROW_LEN), rng)
    stage = curriculum.stage
    if curriculum.polishing:
        stage = int(torch.randint(len(STAGES), (), generator=rng))
    return recall_batch(STAGES[stage], max(1, tokens // STAGES[stage].row_len), rng)
