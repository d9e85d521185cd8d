"""Cost of long runs in a text: a tokenizer that takes their square is found out before it is given one."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from millpond.server.errors import ApiError

#: Characters from which on a run is a long one.
LONG_RUN = 2**10
#: Of two parts of a run one is `STEP` times as long: time that grows with the length is `STEP` times as much, time
#: that grows with the square `STEP**2` times. By one look all up to the first bound is of the length, all from the
#: second on of the square. After `TRIES` looks at both parts in turn (the fastest counts, since others slow a
#: processor down for a moment) the bounds are closer. What lies between is tried with a longer part.
STEP, TRIES = 4, 3
FIRST_LOOK, LAST_LOOK = (5.0, 11.0), (6.0, 8.0)
#: Seconds that all long runs of a text may take by that account.
MAX_S = 2.0
#: Seconds of a part from which on it tells how time grows.
JUDGED_S = 0.025

_BLANKS = re.compile(r"\s\s+")
Span = tuple[int, int]


def check_runs(text: str, encode: Callable[[str], object], param: str) -> None:
    """Refuse a text with runs that would take seconds to tokenize.

    The runs are of blanks, or of anything else. Tokenizers split a text before they look at its words. Where an
    expression that splits tries each place of a run again, or where a run is one word that is gone through again and
    again, time grows with the square of its length.

    Args:
        text: The text.
        encode: Tokenizes a text.
        param: Field of the request that it comes from.

    Raises:
        ApiError: 400, runs are that long, and this tokenizer is that slow.
    """
    if len(text) < LONG_RUN:
        return
    for runs in (_blanks(text), _words(text)):
        if not runs:
            continue
        squares = sum(_length(run) ** 2 for run in runs)
        begin, end = max(runs, key=_length)
        expected = _seconds_by_square(text[begin:end], text[end : end + 1], encode, squares)
        if expected is not None:
            kind = "blanks" if text[begin].isspace() else "characters without a blank"
            message = (
                f"{end - begin:,} {kind} in a row, from character {begin:,} on: this model's tokenizer would take "
                f"{expected:,.0f} s for such runs, and has {MAX_S:g} s; break them up, or leave them out"
            )
            raise ApiError(400, message, "invalid_value", param)


def _seconds_by_square(run: str, behind: str, encode: Callable[[str], object], squares: float) -> float | None:
    """Return the seconds of runs with a sum of squared lengths, if too many; else None.

    Longer and longer parts of the run are tried, so that little time is spent on a tokenizer that takes the square.
    """
    size = LONG_RUN // STEP
    while size <= len(run):
        seconds = _seconds(encode, run[:size] + behind)
        if seconds * squares / size**2 <= MAX_S:  # were it by the square from here on
            return None
        if seconds > JUDGED_S:
            seconds, growth = _growth(encode, run[: size // STEP] + behind, run[:size] + behind, seconds)
            if growth >= LAST_LOOK[1]:
                return seconds * squares / size**2
            if growth <= LAST_LOOK[0] and seconds > 2 * JUDGED_S:  # long enough to be sure
                return None
        size *= STEP
    return None


def _growth(encode: Callable[[str], object], smaller: str, larger: str, seconds: float) -> tuple[float, float]:
    """Return the seconds of the larger of two texts, and how many times the smaller's.

    The larger one took `seconds` once.
    """
    fewer = math.inf
    for _ in range(TRIES):
        fewer = min(fewer, _seconds(encode, smaller))
        if not FIRST_LOOK[0] < seconds / fewer < FIRST_LOOK[1]:
            break
        seconds = min(seconds, _seconds(encode, larger))
        fewer = min(fewer, _seconds(encode, smaller))
    return seconds, seconds / fewer


def _blanks(text: str) -> list[Span]:
    return [run.span() for run in _BLANKS.finditer(text) if _length(run.span()) >= LONG_RUN]


def _words(text: str) -> list[Span]:
    runs, end = list[Span](), 0
    for word in text.split():
        if len(word) >= LONG_RUN:
            begin = text.index(word, end)
            end = begin + len(word)
            runs.append((begin, end))
    return runs


def _length(span: Span) -> int:
    return span[1] - span[0]


def _seconds(encode: Callable[[str], object], text: str) -> float:
    """Return the CPU time of a try, in this thread: what others do meanwhile does not count."""
    began = time.thread_time()
    encode(text)
    return time.thread_time() - began
