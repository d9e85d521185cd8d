"""ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004, "ROUGE: A Package for Automatic Evaluation of Summaries"), F-measures.

Words are lower-case runs of ASCII letters and digits, without stemming; ROUGE-L takes the whole text as one sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from millpond_lab.evals.metrics.common import common_length, f_measure
from millpond_lab.evals.metrics.words import units, units_zh


class Rouge(NamedTuple):
    """The three F-measures."""

    one: float
    two: float
    long: float


def rouge(references: Sequence[str], answer: str) -> Rouge:
    """Each measure for the reference that is best by it.

    Example:
        >>> rouge(["the mill keeps the water"], "the mill loses water").one  # 3 shared, of 4 and of 5
        0.6666666666666666
    """
    return _best([units(reference) for reference in references], units(answer))


def rouge_zh(references: Sequence[str], answer: str) -> Rouge:
    """`rouge` over Chinese characters.

    Departs from LongBench: text is cut into characters, not into words by a dictionary that would have to be installed.
    """
    return _best([units_zh(reference) for reference in references], units_zh(answer))


def _best(references: list[list[str]], answer: list[str]) -> Rouge:
    rows = [(_grams(each, answer, 1), _grams(each, answer, 2), _long(each, answer)) for each in references]
    return Rouge(*(max(column) for column in zip(*rows, strict=True)))


def _grams(left: list[str], right: list[str], n: int) -> float:
    counts = [Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in (left, right)]
    return f_measure((counts[0] & counts[1]).total(), counts[0].total(), counts[1].total())


def _long(left: list[str], right: list[str]) -> float:
    return f_measure(common_length(left, right), len(left), len(right))
