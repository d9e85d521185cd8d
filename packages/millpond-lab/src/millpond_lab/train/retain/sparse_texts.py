"""Sparse rows of pond-recall's families: long texts with few facts, as prompts often are."""

from __future__ import annotations

import numpy as np
import torch

from millpond_lab.pond.facts import Facts, Words
from millpond_lab.pond.text import FILLERS, hide, stream
from millpond_lab.pond.words import BOS_ID
from millpond_lab.train.recall.training_rows import SOURCES, facts_of
from millpond_lab.train.retain.texts import Asked

#: The name of these rows as data.
SPARSE = "recall:sparse"
#: Words of a text.
LENGTH = 1024
#: Words of its facts, about; one after another.
FACT_WORDS = (8, 24, 64, 100)


class SparseRecallTexts:
    """Texts of 1,024 words with some 8 to 100 words of facts of one kind, and questions about them in random order.

    Rows of training have up to 420 words of facts, of several kinds.
    The step names kind and words in turn, so that a few texts hold all of them.

    Args:
        questions: asked of a text at most.
    """

    name = "sparse rows of pond-recall's families"

    def __init__(self, questions: int = 1) -> None:
        self._questions = questions

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """The text of one step of the stream `stream_name`, which is never one of training or of an exam."""
        rng = stream("pond", "sparse", stream_name, seed, step)
        kind, words = SOURCES[step % len(SOURCES)], FACT_WORDS[step % len(FACT_WORDS)]
        facts = facts_of(Words(rng), kind, words)
        filler = FILLERS[int(rng.integers(len(FILLERS)))]
        text = hide(rng, Facts(facts.threads, []), LENGTH, filler)
        chosen = [facts.asked[int(i)] for i in rng.permutation(len(facts.asked))[: self._questions]]
        asked = [np.array(question.question + question.answer) for question in chosen]
        row = np.concatenate([[BOS_ID], text, *asked])
        return Asked(torch.from_numpy(row.astype(np.int64)), LENGTH + 1)
