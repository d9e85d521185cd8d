"""Numbers in answers: counts, paragraph numbers, results of sums."""

from __future__ import annotations

import re
from collections.abc import Sequence

_DIGITS = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")


def number_share(references: Sequence[str], answer: str) -> float:
    """Share of the numbers in the answer that are the wanted one (the first in a reference); the best reference.

    LongBench scores counting and finding a paragraph so: who names many numbers gains little.

    Example:
        >>> number_share(["Paragraph 7"], "Paragraph 7, or perhaps 12")
        0.5
    """
    numbers = _DIGITS.findall(answer)
    wanted = [digits[0] for reference in references if (digits := _DIGITS.findall(reference))]
    return max((numbers.count(each) / len(numbers) for each in wanted), default=0.0) if numbers else 0.0


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators removed, None if there is none.

    Example:
        >>> last_number("16 - 3 is 13, so $1,300.")
        1300.0
    """
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def same_number(references: Sequence[str], answer: str) -> float:
    """1 if the last number of the answer is that of a reference, else 0."""
    number = last_number(answer)
    return float(number is not None and number in [last_number(reference) for reference in references])
