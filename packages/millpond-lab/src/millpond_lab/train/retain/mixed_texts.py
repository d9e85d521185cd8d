"""Mixed rows of pond-recall's families: those of its training, and long ones with few facts, by turns."""

from __future__ import annotations

from millpond_lab.train.retain.sparse_texts import SparseRecallTexts
from millpond_lab.train.retain.texts import Asked, RecallTexts

#: The name of these rows as data.
MIXED = "recall:mixed"
#: Questions about a sparse text at most, as rows of training have several.
QUESTIONS = 12


class MixedRecallTexts:
    """Even steps: rows of training, of 256 to 1,024 words; odd ones: 1,024 words with few facts."""

    name = "rows of pond-recall's families and sparse ones by turns"

    def __init__(self) -> None:
        self._rows, self._sparse = RecallTexts(), SparseRecallTexts(QUESTIONS)

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """The text of one step of the stream `stream_name`."""
        source = self._sparse if step % 2 else self._rows
        return source.draw(stream_name, seed, step // 2)
