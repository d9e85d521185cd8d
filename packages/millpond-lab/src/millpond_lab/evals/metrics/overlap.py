"""Exact match and the F1 of shared words, as question answering is scored (Rajpurkar et al., arXiv:1606.05250)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from millpond_lab.evals.metrics.common import f_measure
from millpond_lab.evals.metrics.words import normal, units_zh


def exact(references: Sequence[str], answer: str) -> float:
    """1 if the answer equals a reference once case, punctuation and articles are gone, else 0.

    Example:
        >>> exact(["The mill"], "mill.")
        1.0
    """
    return float(normal(answer) in map(normal, references))


def f1(references: Sequence[str], answer: str) -> float:
    """The best F1 of the words shared with a reference.

    Example:
        >>> f1(["the old mill pond"], "an old mill")  # 2 shared, of 3 and of 2
        0.8
    """
    return max(_shared(normal(reference).split(), normal(answer).split()) for reference in references)


def f1_zh(references: Sequence[str], answer: str) -> float:
    """`f1` for Chinese.

    Departs from LongBench: text is cut into characters, not into words by a dictionary that would have to be installed.

    Example:
        >>> f1_zh(["磨坊"], "磨坊。")
        1.0
    """
    return max(_shared(units_zh(reference), units_zh(answer)) for reference in references)


def _shared(left: list[str], right: list[str]) -> float:
    return f_measure((Counter(left) & Counter(right)).total(), len(left), len(right))
