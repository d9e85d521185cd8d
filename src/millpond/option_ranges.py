"""Ranges of numbers that an option takes, declared with its help: `Annotated[int, "help", Range(1, 64)]`.

An option that is a count or a share has a range for each, in the order of its type: `Annotated[int | float, "help",
POSITIONS, SHARE]`.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any

from millpond.errors import OptionError

#: Characters of a value that an error shows.
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`.

    Attributes:
        above: Whether `low` itself is excluded.
        odd: Whether even numbers are excluded.

    Example:
        >>> Range(0, 1, above=True).holds(0), str(Range(0, 1, above=True))
        (False, 'above 0 and at most 1')
    """

    low: int | float
    high: int | float
    above: bool = False
    odd: bool = False

    def holds(self, value: int | float) -> bool:
        """Whether a number is in the range; NaN never is."""
        inside = (self.low < value if self.above else self.low <= value) and value <= self.high
        return inside and (not self.odd or value % 2 == 1)

    def __str__(self) -> str:
        low, high = _written(self.low), _written(self.high)
        bounds = f"above {low} and at most {high}" if self.above else f"{low} to {high}"
        return f"odd, {bounds}" if self.odd else bounds


def _written(end: int | float) -> str:
    return f"{int(end):,}" if math.isfinite(end) and end == int(end) else f"{end:g}"


def brief(value: Any) -> str:
    """Return a value as an error shows it, however long it is.

    Example:
        >>> brief(2**70), brief("x" * 200)[:8], brief(10**5000)
        ('1180591620717411303424', "'xxxxxxx", 'an integer of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        text = repr(value[:_SHOWN])
    else:
        text = repr(value) if isinstance(value, bool | int | float | None) else reprlib.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


#: Counts of positions, entries or tokens: more than the longest context of any model.
MAX_POSITIONS = 2**24
POSITIONS = Range(0, MAX_POSITIONS)
#: The same, of what must be one at least.
SOME_POSITIONS = Range(1, MAX_POSITIONS)
#: Shares of something.
SHARE = Range(0.0, 1.0)
#: Seeds of random numbers.
SEEDS = Range(0, 2**32 - 1)
#: Last queries of a prompt that are kept until its plan, and weighed against every entry.
QUERIES = Range(1, 1024)
#: Widths of a pool over neighbouring entries, odd so that it keeps its place: its time grows with them.
POOL_WIDTHS = Range(1, 255, odd=True)
#: Of a numeric option that declares nothing, such as one of an installed package: what 32 bits hold.
UNDECLARED = Range(-(2**31), 2**31 - 1)

#: Parts of one prompt, each read by itself, that options may ask for beyond what their defaults would.
MAX_PARTS = 128


def check_parts(name: str, value: int, usual: int, n_tokens: int) -> None:
    """Refuse an option that cuts a prompt into far more parts than its default.

    The default cuts it into parts of `usual` tokens.

    Raises:
        OptionError: `n_tokens` tokens in parts of `value` are more than `MAX_PARTS`.

    Example:
        >>> check_parts("chunk", 64, 256, 8_000)
    """
    minimum = min(usual, -(-n_tokens // MAX_PARTS))
    if value < minimum:
        raise OptionError(
            f"{name}={value} would read a prompt of {n_tokens:,} tokens in {-(-n_tokens // value):,} parts; "
            f"give at least {minimum}"
        )
