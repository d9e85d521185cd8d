"""How much longer a step may take because of clients who have had more service than others in it.

What they add to steps is owed to the others, and paid back in steps without them, so that whoever has had less goes at
half the speed at least that it would have without them. It sees no clock: seconds are given to it.
"""

from __future__ import annotations

#: Weight of the newest step in the mean of those without the others.
_NEWEST = 0.2


class Pace:
    """What those who have had more service owe.

    Attributes:
        owed: seconds that must pass before they take part in a step again.
    """

    def __init__(self) -> None:
        self.owed = 0.0
        self._alone = 0.0  # seconds of a step without them in which nothing is read

    @property
    def may_go(self) -> bool:
        """Whether they take part in the next step."""
        return self.owed <= 0

    def with_them(self, seconds: float) -> None:
        """A step in which they took part."""
        self.owed += max(seconds - self._alone, 0.0)

    def without_them(self, seconds: float, reads: bool) -> None:
        """A step in which they did not, whether they wanted to or were not there; or in which prompts were read."""
        self.owed = max(self.owed - seconds, 0.0)
        if not reads:
            self._alone += (seconds - self._alone) * (_NEWEST if self._alone else 1.0)
