"""The tasks in the language of `pond-recall`, whose tokenizer knows some seven hundred words and no English sentence.

What is asked is the same as in English; `models/pond` words it, from streams that training does not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from millpond_lab.evals.sample import Question, Sample
from millpond_lab.pond import words as w
from millpond_lab.pond.facts import FactQuestion, draw_paper, spell


def speaks_pond(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this is the tokenizer of `pond-recall`."""
    return tuple(tokenizer.convert_ids_to_tokens(list(range(len(w.MARKS))))) == w.MARKS


def pond_samples(family: str, count: int, seed: int, *, length: int, **knobs: Any) -> Iterator[Sample]:
    """Samples of one task in the language of `pond-recall`; see `millpond_lab.pond.facts.draw_paper`.

    Args:
        family: the task's name.
        count: how many samples.
        seed: names them; the same sample whatever `count` is.
        length: tokens of a sample at most, with its longest question and answer.
        **knobs: `questions`, `depth`, and the numbers that the task's facts take.

    Raises:
        OptionError: no such task, or facts that do not fit into `length`.
    """
    details = {"length": length, **({"depth": knobs["depth"]} if "depth" in knobs else {})}
    for index in range(count):
        paper = draw_paper(family, seed, index, length, knobs)
        yield Sample(
            f"{family}-{length}-{seed}-{index}", spell(paper.text[1:]), tuple(map(_question, paper.asked)), details
        )


def _question(asked: FactQuestion) -> Question:
    words = tuple(w.VOCABULARY[word] for word in asked.references)
    return Question(" " + spell(asked.question), words, len(asked.answer))
