"""Free runs of bytes in a space that grows."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeList:
    """Which bytes of `size` are taken; the first gap that is large enough is taken first.

    Attributes:
        size: bytes of the space. used: of these, those that are taken.

    Example:
        >>> space = FreeList()
        >>> space.grow(100)
        >>> first, second = space.take(40), space.take(60)
        >>> space.give_back(first, 40)
        >>> space.take(30), space.take(20)
        (0, None)
    """

    def __init__(self) -> None:
        self.size = self.used = 0
        self._gaps: list[tuple[int, int]] = []  # begin and end, ascending, none next to another

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` begin that were free; None where there is no such gap."""
        for place, (begin, end) in enumerate(self._gaps):
            if end - begin >= nbytes:
                self._gaps[place : place + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                self.used += nbytes
                return begin
        return None

    def give_back(self, begin: int, nbytes: int) -> None:
        """Bytes that were taken are free again."""
        self.used -= nbytes
        self._add(begin, begin + nbytes)

    def grow(self, nbytes: int) -> None:
        """Let `nbytes` more at the end be free."""
        self._add(self.size, self.size + nbytes)
        self.size += nbytes

    def lacking(self, nbytes: int) -> int:
        """Bytes by which the space must grow before `take(nbytes)` finds a gap."""
        if any(end - begin >= nbytes for begin, end in self._gaps):
            return 0
        at_end = self._gaps[-1] if self._gaps and self._gaps[-1][1] == self.size else (0, 0)
        return nbytes - (at_end[1] - at_end[0])

    def _add(self, begin: int, end: int) -> None:
        place = bisect_left(self._gaps, (begin, end))
        if place < len(self._gaps) and self._gaps[place][0] == end:
            end = self._gaps.pop(place)[1]
        if place and self._gaps[place - 1][1] == begin:
            begin = self._gaps.pop(place - 1)[0]
        insort(self._gaps, (begin, end))
