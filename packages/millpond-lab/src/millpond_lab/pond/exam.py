"""Exams of `pond-recall`: one text and its questions, by task, from streams that training never reads.

The numbers of facts were fixed before any method was compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from millpond.errors import OptionError, unknown
from millpond_lab.pond import facts as f
from millpond_lab.pond import words as w
from millpond_lab.pond.facts import FactQuestion, Facts, Words
from millpond_lab.pond.text import Filler, hide, stream
from millpond_lab.pond.words import BOS_ID

Knobs = Mapping[str, Any]


class Paper(NamedTuple):
    """One examination paper: a text, `<bos>` first, and questions about it."""

    text: np.ndarray  # (L,) word ids
    asked: list[FactQuestion]


def draw_paper(task: str, seed: int, index: int, length: int, knobs: Knobs | None = None) -> Paper:
    """The paper number `index` of a task under `seed`.

    Args:
        task: one of `TASKS`.
        seed, index: name the paper.
        length: tokens, `<bos>` and the longest question with its answer included.
        knobs: `questions` (asked of one text, default 1), `depth` (of the first fact, 0 to 1), and the numbers that
            the task's facts take, such as `pairs`.

    Raises:
        OptionError: no such task, or facts that do not fit into `length`.
    """
    if task not in _FACTS:
        raise unknown("task of pond-recall", task, _FACTS)
    knobs = knobs or {}
    rng = stream("pond", "eval", task, seed, index)
    facts = _FACTS[task](Words(rng), knobs)
    family = _FAMILY.get(task, task)
    asked = [question for question in facts.asked if question.family == family]
    wanted = int(knobs.get("questions", 1))
    if not 1 <= wanted <= len(asked):
        raise OptionError(f"questions={wanted}: a text of {task} answers 1 to {len(asked)}")
    chosen = [asked[int(i)] for i in rng.permutation(len(asked))[:wanted]]
    longest = max(len(question.question) + len(question.answer) for question in chosen)
    text = hide(rng, facts, length - 1 - longest, _filler(task, knobs), knobs.get("depth"))
    return Paper(np.concatenate([[BOS_ID], text]), chosen)


def spell(ids: np.ndarray | tuple[int, ...]) -> str:
    """Word ids as text."""
    return " ".join(w.VOCABULARY[int(i)] for i in ids)


def _filler(task: str, knobs: Knobs) -> Filler:
    """The one needle of variant 1 lies in a refrain, as in RULER; everything else in varied words."""
    return "refrain" if task == "niah_single" and int(knobs.get("variant", 1)) == 1 else "zipf"


def _pairs(count: int) -> Callable[[Words, Knobs], Facts]:
    return lambda draw, knobs: f.pairs(draw, int(knobs.get("pairs", count)))


def _multikey(draw: Words, knobs: Knobs) -> Facts:
    return f.pairs(draw, 4 if int(knobs.get("variant", 1)) == 1 else 96)


_FACTS: dict[str, Callable[[Words, Knobs], Facts]] = {
    "recall": _pairs(32),
    "overwritten": lambda draw, knobs: f.retold(draw, int(knobs.get("pairs", 12))),
    "niah_single": _pairs(1),
    "niah_multikey": _multikey,
    "niah_multivalue": lambda draw, knobs: f.manifold(draw, int(knobs.get("pairs", 8)), 4),
    "niah_multiquery": _pairs(16),
    "tracking": lambda draw, knobs: f.chains(draw, int(knobs.get("chains", 4)), int(knobs.get("hops", 4))),
    "copy": lambda draw, knobs: f.passages(draw, int(knobs.get("passages", 4)), int(knobs.get("words", 8))),
    "frequent_words": lambda draw, knobs: f.frequent(draw, int(knobs.get("words", 60))),
    "common_words": lambda draw, knobs: f.common(draw, int(knobs.get("words", 44))),
}
#: The family of questions that a task asks, where its name is another.
_FAMILY = {
    "niah_single": "recall",
    "niah_multikey": "recall",
    "niah_multivalue": "multivalue",
    "niah_multiquery": "multiquery",
    "frequent_words": "frequent",
    "common_words": "common",
}
TASKS = tuple(_FACTS)
