"""Predictions of one reader, kept to be compared with those of many others on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millpond_lab.evals.decoding.batch import Tokens
from millpond_lab.evals.decoding.batch_reader import BatchReader
from millpond_lab.evals.decoding.likelihood import forced


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
