"""Pace of decoding: a bound on the time that prompts, and clients who have had more service, add to its steps.

What these guests add to steps is owed, and paid back in steps without them, which aims at two thirds of the speed
that whoever decodes would have without them. It sees no clock: seconds are given to it.
"""

from __future__ import annotations

#: Weight of the newest step in the mean of those without the others.
_NEWEST = 0.2
#: What is left of that mean after each step with guests: it is taken again before long.
_FADES = 0.95
#: Seconds that are owed for each that guests add. What is not measured, such as answers that decode too, comes on top.
PAID_BACK = 2.0


class Pace:
    """What guests owe.

    Attributes:
        owed: seconds that must pass before they take part in a step again.
    """

    def __init__(self) -> None:
        self.owed = 0.0
        self._alone = 0.0  # seconds of a step without them in which nothing is read

    def begin_anew(self) -> None:
        """Others decode now: how long their steps take is not known."""
        self._alone = 0.0

    @property
    def may_go(self) -> bool:
        """Whether they take part in the next step."""
        return self.owed <= 0

    def with_them(self, seconds: float) -> None:
        """A step in which they took part."""
        self.owed += PAID_BACK * max(seconds - self._alone, 0.0)
        self._alone *= _FADES

    def without_them(self, seconds: float, reads: bool) -> None:
        """A step in which they did not, whether they wanted to or were not there; or in which prompts were read."""
        self.owed = max(self.owed - seconds, 0.0)
        if not reads:
            self._alone += (seconds - self._alone) * (_NEWEST if self._alone else 1.0)
