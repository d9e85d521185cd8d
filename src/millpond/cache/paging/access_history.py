"""Past accesses of pages, by their keys, as far back as a window of accesses reaches."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from millpond.cache.paging.features import MOST_ACCESSES, gap_step
from millpond.cache.paging.key_table import KeyTable

_NOTHING = -1


class Past(NamedTuple):
    """A page before an access.

    Attributes:
        accesses: before, 9 for more. last: number of the last one, None: there was none. gap: step of the time since.
        gap_before: step of the one before.
    """

    accesses: int
    last: int | None
    gap: int
    gap_before: int


class AccessHistory:
    """Pages of the last `window` accesses, held by the cache or not: at most 28 bytes for each access of the window."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._numbers = KeyTable()
        self._last = array("Q")  # by number
        self._gaps, self._accesses = bytearray(), bytearray()
        self._unused: list[int] = []
        self._log = array("i")  # numbers of the accesses of the window
        self.clock = 0

    def access(self, key: int) -> Past:
        """Note an access, the `clock`-th, and return what was known before."""
        now, at = self.clock, self.clock % self._window
        self.clock += 1
        if at == len(self._log):
            self._log.append(_NOTHING)
        else:
            self._forget(self._log[at], now - self._window)
        number = self._numbers.get(key)
        if number is None:
            number = self._new(key)
            past = Past(0, None, 0, 0)
        else:
            last = self._last[number]
            past = Past(self._accesses[number], last, gap_step(now - last), self._gaps[number])
        self._log[at] = number
        self._last[number], self._gaps[number] = now, past.gap
        self._accesses[number] = min(past.accesses + 1, MOST_ACCESSES)
        return past

    def _new(self, key: int) -> int:
        if self._unused:
            number = self._unused.pop()
        else:
            number = len(self._last)
            self._last.append(0)
            self._gaps.append(0)
            self._accesses.append(0)
        self._numbers.add(key, number)
        return number

    def _forget(self, number: int, at: int) -> None:
        """An access leaves the window; its page does if that was the last one."""
        if self._last[number] == at:
            self._numbers.remove(number)
            self._accesses[number] = self._gaps[number] = 0
            self._unused.append(number)
