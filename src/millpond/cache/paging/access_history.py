"""Past accesses of pages, by their keys, as far back as a window of accesses reaches."""

from __future__ import annotations

from typing import NamedTuple

from millpond.cache.paging.features import MOST_ACCESSES, gap_step
from millpond.cache.paging.key_table import KeyTable


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
    """Pages of the last `window` accesses, held by the cache or not: at most 22 bytes for each access of the window.

    Accesses have slots in turn, and a page is filed under that of its last access.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._slots = KeyTable()
        self._gaps, self._accesses = bytearray(), bytearray()  # by slot; no accesses: the page has a later one
        self.clock = 0

    def access(self, key: int) -> Past:
        """Note an access, the `clock`-th, and return what was known before."""
        now, slot = self.clock, self.clock % self._window
        self.clock += 1
        earlier = self._slots.get(key)
        if slot == len(self._gaps):
            self._gaps.append(0)
            self._accesses.append(0)
        elif self._accesses[slot]:  # the last access of its page leaves the window
            self._slots.remove(slot)
            if earlier == slot:
                earlier = None
        if earlier is None:
            past = Past(0, None, 0, 0)
            self._slots.add(key, slot)
        else:
            last = now - (slot - earlier) % self._window
            past = Past(self._accesses[earlier], last, gap_step(now - last), self._gaps[earlier])
            self._slots.move(earlier, slot)
            self._accesses[earlier] = 0
        self._gaps[slot] = past.gap
        self._accesses[slot] = min(past.accesses + 1, MOST_ACCESSES)
        return past
