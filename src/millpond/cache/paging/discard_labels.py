"""Labels of past accesses: whether the best rule would have evicted a page before it was used again."""

from __future__ import annotations

import numpy as np

#: Accesses that share one count of the pages that the best rule holds.
_QUANTUM_BITS = 4


class DiscardLabels:
    """Counts how many pages the best rule holds at each time, as OPTgen does (Jain and Lin, 2016).

    A page that is used again is a hit of the best rule if from its last use until now a place was free at every time;
    then it takes that place. Costs one look at the counts in between, at most `window` / 16 numbers of 4 bytes.

    Args:
        window: accesses that are looked back at, a multiple of 16.
    """

    def __init__(self, window: int) -> None:
        self._window = window >> _QUANTUM_BITS
        self._held = np.zeros(2 * self._window, np.int32)
        self._begin = 0  # of the counts, in quanta

    def discards(self, last: int, now: int, pages: int | None) -> bool:
        """Whether the best rule of a cache of `pages` pages (None: any number) evicts a page used at `last` and `now`.

        last, now: numbers of accesses, less than `window` apart; `now` never goes back.
        """
        first, end = (last >> _QUANTUM_BITS), (now >> _QUANTUM_BITS)
        if end - self._begin > len(self._held):
            self._forget(end)
        held = self._held[max(first - self._begin, 0) : end - self._begin]
        if pages is not None and held.size and held.max() >= pages:
            return True
        held += 1
        return False

    def _forget(self, now: int) -> None:
        """Move the counts so that the last `window` accesses before `now` stay."""
        shift = min(now - self._window - self._begin, len(self._held))
        self._held[: len(self._held) - shift] = self._held[shift:].copy()
        self._held[len(self._held) - shift :] = 0
        self._begin = now - self._window
