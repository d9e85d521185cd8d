"""Made-up loads: lengths from a range, and a beginning that all prompts share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from millpond.errors import OptionError
from millpond_lab.bench.serve.requests import LoadRequest, TokenBlocks


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths from `low` to `high`, each as likely.

    Example:
        >>> Span.parse("64"), Span.parse("64-256")
        (Span(low=64, high=64), Span(low=64, high=256))
    """

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """From "64" or "64-256".

        Raises:
            OptionError: not of this form, below 1, or the wrong way round.
        """
        low, _, high = text.strip().partition("-")
        if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
            raise OptionError(f"length {text!r} must read as 64 or 64-256, in tokens, 1 at least")
        return cls(int(low), int(high or low))


def synthetic(n: int, prompt: Span, output: Span, shared: int = 0, seed: int = 0) -> list[LoadRequest]:
    """`n` asks that stand alone, all at 0 s; the first `shared` tokens of every prompt are the same.

    Raises:
        OptionError: the shared tokens leave no room in the shortest prompt for one of its own.
    """
    if not 0 <= shared < prompt.low:
        raise OptionError(f"{shared} shared tokens do not leave one of its own in a prompt of {prompt.low}")
    drawn = random.Random(seed)
    asks = []
    for name in range(1, n + 1):
        length = drawn.randint(prompt.low, prompt.high)
        parts = ((0, shared), (name, length - shared)) if shared else ((name, length),)
        asks.append(LoadRequest(0.0, TokenBlocks(parts), drawn.randint(output.low, output.high)))
    return asks
