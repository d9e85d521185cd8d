"""Answers that name a class or a letter."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Capitals alone, in a row or in a list: "B", "(B)", "ABD", "A, C and D". What comes after another word is not chosen.
_LETTERS = re.compile(r"(?<![\w'])[A-H]+(?![\w'])(?:(?:[\s,/&().]|and)+[A-H]+(?![\w']))*")


def class_named(references: Sequence[str], answer: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them, else 0 (LongBench).

    A class whose name is part of the right one's does not count as named.

    Example:
        >>> class_named(["Weather"], "Weather or Sport", ["Weather", "Sport", "Law"])
        0.5
    """
    return max(_named(reference, answer, classes) for reference in references)


def _named(right: str, answer: str, classes: Sequence[str]) -> float:
    named = {name for name in (*classes, right) if name in answer and (name == right or name not in right)}
    return 1 / len(named) if right in named else 0.0


def letters_chosen(references: Sequence[str], answer: str) -> float:
    """1 if the letters that the answer names first are exactly those of a reference, else 0.

    Example:
        >>> letters_chosen(["AC"], "A and C, since both hold")
        1.0
        >>> letters_chosen(["B"], "The answer is (D).")
        0.0
    """
    chosen = _letters(answer)
    return float(bool(chosen) and chosen in [_letters(reference) for reference in references])


def _letters(text: str) -> frozenset[str]:
    first = _LETTERS.search(text)
    return frozenset(first.group()) & frozenset("ABCDEFGH") if first else frozenset()
