"""Plans that follow the load: a new one where the newest requests are unlike those that the last one was made for.

Source: DistServe, arXiv:2401.09670, section 4.3 (replanning). Ours looks at lengths alone: goodput per device does not
depend on the rate of arrivals.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpond.errors import DataError

#: Share by which a mean length may change before the load counts as another one.
SHIFT = 0.2

Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Mean tokens of prompts and of answers."""

    prompt: float
    output: float

    @classmethod
    def of(cls, lengths: Lengths) -> LoadShape:
        """Of (prompt, output) tokens of at least one request."""
        return cls(statistics.fmean(one for one, _ in lengths), statistics.fmean(one for _, one in lengths))

    def shift(self, newer: LoadShape) -> str | None:
        """A sentence on how a newer load differs; None where it is alike.

        >>> LoadShape(1000, 100).shift(LoadShape(1100, 150))
        'The mean answer went from 100 to 150 tokens.'
        """
        changes = [
            f"the mean {name} went from {old:,.0f} to {new:,.0f} tokens"
            for name, old, new in (("prompt", self.prompt, newer.prompt), ("answer", self.output, newer.output))
            if abs(new - old) > SHIFT * old
        ]
        text = " and ".join(changes)
        return f"{text[0].upper()}{text[1:]}." if text else None


def watch(
    read: Callable[[], Lengths],
    plan: Callable[[Lengths], None],
    wait: Callable[[], None],
    report: Callable[[str], None],
) -> None:
    """Plan, and plan again whenever the load has shifted; it ends by what `wait` raises.

    Args:
        read: the newest requests.
        plan: makes a plan for them.
        wait: returns when it is time to look again.
        report: gets a sentence before each new plan, and where the requests cannot be read at the moment.

    Raises:
        DataError: the requests cannot be read the first time.
    """
    lengths = read()
    plan(lengths)
    planned = LoadShape.of(lengths)
    while True:
        wait()
        try:
            lengths = read()
        except DataError as error:  # a line may be half written
            report(f"The last plan stays: {error}")
            continue
        newest = LoadShape.of(lengths)
        change = planned.shift(newest)
        if change is not None:
            report(change)
            plan(lengths)
            planned = newest
