"""Share of the wanted words that an answer holds."""

from __future__ import annotations

import re
from collections.abc import Sequence

from millpond_lab.evals.metrics.common import common_length

_CONTROL = re.compile(r"[\x00-\x1f]")


def found(references: Sequence[str], answer: str) -> float:
    """Share of the references that occur in the answer, whatever the case, as whole words.

    RULER's `string_match_all`, but for the whole words: "pear" is not found in "pearl".

    Example:
        >>> found(["8126", "Mill"], "It is 8126, or the windmill.")
        0.5
    """
    return sum(_holds(answer, reference) for reference in references) / len(references)


def found_any(references: Sequence[str], answer: str) -> float:
    """1 if any reference occurs in the answer, whatever the case, as whole words, else 0."""
    return float(any(_holds(answer, reference) for reference in references))


def string_match_all(references: Sequence[str], answer: str) -> float:
    """Share of the references that occur in the answer, whatever the case, in words too: RULER's score of its files.

    Example:
        >>> string_match_all(["8126", "Mill"], "It is 81267, or the windmill.")
        1.0
    """
    text = _printable(answer)
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(references: Sequence[str], answer: str) -> float:
    """1 if any reference occurs in the answer, whatever the case, in words too, else 0: RULER's for questions."""
    text = _printable(answer)
    return float(any(reference.lower() in text for reference in references))


def in_order(references: Sequence[str], answer: str) -> float:
    """Share of the words of a passage that an answer repeats in their order.

    Example:
        >>> in_order(["one two three four"], "one three two four")
        0.75
    """
    words = " ".join(references).lower().split()
    return common_length(words, answer.lower().split()) / len(words)


def _printable(answer: str) -> str:
    """As RULER reads answers: control characters are line breaks, and none at the ends."""
    return _CONTROL.sub("\n", answer.strip()).strip().lower()


def _holds(answer: str, reference: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(reference.strip())}(?!\w)", answer, re.IGNORECASE) is not None
