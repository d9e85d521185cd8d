"""Sparse rows of pond-recall's families: long texts with few facts, as prompts often are."""

from __future__ import annotations

import numpy as np
import torch

from millpond.models.pond.facts import Facts, Words
from millpond.models.pond.text import FILLERS, hide, stream
from millpond.models.pond.words import BOS_ID
from millpond.train.recall.training_rows import SOURCES, facts_of
from millpond.train.retain.texts import Asked

#: The name of these rows as data.
SPARSE = "recall:sparse"
#: Words of a text.
LENGTH = 1024
#: Words of its facts, about; one after another.
FACT_WORDS = (8, 24, 64, 100)


class SparseRecallTexts:
    """Texts of 1,024 words with some 8 to 100 words of facts of one kind, and its first question.

    Rows of training have up to 420 words of facts, of several kinds.
    The step names kind, words and filler in turn, so that a few texts hold all of them.
    """

    name = "sparse rows of pond-recall's families"

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """The text of one step of the stream `stream_name`, which is never one of training or of an exam."""
        rng = stream("pond", "sparse", stream_name, seed, step)
        kind, words = SOURCES[step % len(SOURCES)], FACT_WORDS[step % len(FACT_WORDS)]
        facts = facts_of(Words(rng), kind, words)
        filler = FILLERS[int(rng.integers(len(FILLERS)))]
        text = hide(rng, Facts(facts.threads, []), LENGTH, filler)
        question = facts.asked[0]
        row = np.concatenate([[BOS_ID], text, question.question, question.answer])
        return Asked(torch.from_numpy(row.astype(np.int64)), LENGTH + 1)
