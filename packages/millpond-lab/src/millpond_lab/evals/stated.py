"""Whether an answer states a fact, in whichever of the usual ways it writes a date or a number."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MONTHS = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
_MONTH, _DAY = f"({'|'.join(_MONTHS)})", r"\b0?(\d{1,2})(?:st|nd|rd|th)?"
_DAY_FIRST = re.compile(rf"{_DAY}(?: day)?(?: of)? {_MONTH},? ?(?:in )?(\d{{4}})\b")
_MONTH_FIRST = re.compile(rf"\b{_MONTH} (?:the )?{_DAY[2:]},? ?(\d{{4}})\b")
_BY_NUMBERS = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DASHES = re.compile("[\u2010-\u2015]")


def stated(references: Sequence[str], answer: str) -> float:
    """1 if the answer holds every reference, whatever the case and the white space, else 0.

    A date counts in words however it is ordered, or as year, month and day in numbers; a number with or without commas
    at its thousands. A reference inside a longer word or number does not count.

    Example:
        >>> stated(["Velmar Okotin"], "It is velmar\\nokotin.")
        1.0
        >>> stated(["8 June 1905"], "It was opened on June 8th, 1905."), stated(["8 June 1905"], "On 18 June 1905.")
        (1.0, 0.0)
    """
    text = _even(answer)
    return float(all(_holds(text, _even(reference)) for reference in references))


def _holds(text: str, part: str) -> bool:
    before = r"(?<!\w)" if part[:1].isalnum() else ""
    behind = r"(?!\w)" if part[-1:].isalnum() else ""
    return re.search(before + re.escape(part) + behind, text) is not None


def _even(text: str) -> str:
    """A text in lower case, with single spaces, each date as day, month and year, and numbers without commas."""
    text = _DASHES.sub("-", " ".join(text.split()).lower())
    text = _DAY_FIRST.sub(r"\1 \2 \3", text)
    text = _MONTH_FIRST.sub(r"\2 \1 \3", text)
    text = _BY_NUMBERS.sub(_in_words, text)
    return _THOUSANDS.sub("", text)


def _in_words(date: re.Match[str]) -> str:
    year, month, day = date.groups()
    return f"{int(day)} {_MONTHS[int(month) - 1]} {year}" if 1 <= int(month) <= 12 else date[0]
