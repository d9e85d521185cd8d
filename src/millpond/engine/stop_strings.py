"""The first of several stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text on up to the first stop text, whichever way it is cut into pieces.

    The one that is complete first counts; of those complete at the same character, the longest. The cost is a step
    per character and stop text (Knuth, Morris and Pratt 1977).

    Attributes:
        found: the stop text that was met.

    Example:
        >>> finder = StopStringMatcher(["END"])
        >>> finder.add("the E"), finder.add("N"), finder.add("D of it"), finder.found
        ('the ', '', '', 'END')
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.found: str | None = None
        self._include = include
        self._stops = [(stop, _borders(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._matched = [0] * len(stops)  # characters of each stop text that the text so far ends with
        self._held = ""

    def add(self, text: str, end: bool = True) -> str:
        """The text that can be passed on now; what may begin a stop text is held back.

        Args:
            end: off: a stop text that is complete within this text does not count.
        """
        if not self._stops:
            return text
        text = self._held + text
        for place in range(len(self._held), len(text)):
            stop = self._step(text[place])
            if stop is not None and end:
                self.found, self._held = stop, ""
                return text[: place + 1] if self._include else text[: place + 1 - len(stop)]
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """The longest stop text that this character completes."""
        complete = None
        for i, (stop, borders) in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != character:
                n = borders[n - 1]
            if stop[n] == character:
                n += 1
            if n == len(stop):
                complete = complete or stop
                n = borders[n - 1]
            self._matched[i] = n
        return complete


def _borders(stop: str) -> list[int]:
    """For each beginning of a text, the length of its longest proper beginning that is also its end."""
    borders, n = [0], 0
    for character in stop[1:]:
        while n and stop[n] != character:
            n = borders[n - 1]
        if stop[n] == character:
            n += 1
        borders.append(n)
    return borders
