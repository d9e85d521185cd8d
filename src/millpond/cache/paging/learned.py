"""Learned eviction: discard bits from a small predictor, never much worse than LRU (after arXiv:2210.02775)."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from typing import Annotated

from millpond.cache.paging import paging_rule
from millpond.cache.paging.page_directory import BitDirectory, KeyTable, LRUDirectory, PageDirectory
from millpond.cache.paging.predictor import PredictedBits
from millpond.cache.paging.rule import PageFacts, PagingRule
from millpond.option_files import FILE

_NONE = -1
#: Accesses that count as "lately", as a multiple of the pages of the cache.
_MEMORY = 2.0
#: Misses that the other rule must have been better by, as a multiple of the pages of the cache.
_MARGIN = 0.02
#: Misses more than LRU's that the guarantee allows.
SLACK = 0.01


class FollowTheBetter(PagingRule):
    """Rule that follows the better of LRU and "discarded pages first, then LRU".

    Two directories run these rules; the one with fewer misses lately is followed, by evicting pages that it does not
    hold. The rule leaves LRU only while its misses are at most 1.01 times LRU's, and returns as soon as they exceed
    that by the pages of the cache; a return costs as many misses once more. So its misses are at most 1.01 times LRU's,
    plus twice the pages of the cache, whatever the bits are.

    Pages that a directory holds, but not the cache, are remembered by number and key alone.

    Args:
        bits: Discard bits of accesses.

    Attributes:
        lru: Pages that LRU would hold.
        misses: Misses of the cache.
        switches: Changes of the leader.
    """

    name = "learned"

    def __init__(self, bits: PredictedBits) -> None:
        self._bits = bits
        self.lru, self._bit = LRUDirectory(), BitDirectory()
        self._keys = KeyTable()  # of all numbers; those that the cache does not hold are filed
        self._number_of = array("i")  # page -> number
        self._page_of = array("i")  # number -> page
        self._unused: list[int] = []  # numbers
        self._allowed = bytearray()  # by page
        self._outside: deque[int] = deque()  # numbers that the leader does not hold
        self._n_pages = 0
        self._max_pages: int | None = None  # pages that directories hold
        self._follows_bits = False
        self._lead = 0.0  # misses that LRU had lately and bits had not
        self.misses = self.switches = 0

    @property
    def leader(self) -> PageDirectory:
        """Directory that is followed."""
        return self._bit if self._follows_bits else self.lru

    @property
    def n_known(self) -> int:
        """Pages that the cache or a directory holds."""
        return len(self._page_of) - len(self._unused)

    def touch(self, page: int, facts: PageFacts) -> None:
        """See `PagingRule`."""
        while page >= len(self._number_of):
            self._number_of.append(_NONE)
            self._allowed.append(0)
        number = self._number_of[page]
        if number == _NONE:
            self.misses += 1
            self._n_pages += 1
            number = self._number_for(facts.key)
            self._number_of[page], self._page_of[number] = number, page
        parent = _NONE if facts.parent == _NONE else self._number_of[facts.parent]
        previous_lead = self.lru.misses - self._bit.misses
        self.lru.touch(number, parent)
        self._bit.touch(number, parent, self._bits.bit(facts))
        self._lead += self.lru.misses - self._bit.misses - previous_lead
        self._shrink()
        self._choose_leader()

    def allow(self, page: int) -> None:
        """See `PagingRule`."""
        self._allowed[page] = 1
        number = self._number_of[page]
        if number not in self.leader:
            self._outside.append(number)

    def forbid(self, page: int) -> None:
        """See `PagingRule`."""
        self._allowed[page] = 0

    def drop(self, page: int) -> None:
        """See `PagingRule`."""
        number = self._number_of[page]
        self._number_of[page] = self._page_of[number] = _NONE
        self._allowed[page] = 0
        self._n_pages -= 1
        if number in self.lru or number in self._bit:
            self._keys.file(number)
        else:
            self._unused.append(number)

    def victim(self) -> int | None:
        """See `PagingRule`."""
        self._max_pages = self._bits.pages = max(self._n_pages, 1)
        self._shrink()
        leader = self.leader
        while True:
            while self._outside:
                page = self._page_of[self._outside[0]]
                if page != _NONE and self._allowed[page] and self._outside[0] not in leader:
                    return page
                self._outside.popleft()
            number = leader.evict()
            if number is None:
                return None
            self._left_leader(number)

    def _choose_leader(self) -> None:
        if self._max_pages is None:
            return
        self._lead *= 1 - 1 / (_MEMORY * self._max_pages)
        excess = self.misses - (1 + SLACK) * self.lru.misses
        if self._follows_bits:
            change = excess >= self._max_pages - 1 or self._lead < -_MARGIN * self._max_pages
        else:
            change = excess <= 0 and self._lead > _MARGIN * self._max_pages
        if change:
            order = self.leader.in_order()
            self._follows_bits = not self._follows_bits
            self.switches += 1
            self._outside = self._evictable_outside(order)

    def _evictable_outside(self, order: Iterator[int]) -> deque[int]:
        """Return the numbers of evictable pages that the leader does not hold.

        They are in the order of the previous leader.
        """
        leader, numbers = self.leader, self._number_of
        outside = {
            numbers[page] for page, allowed in enumerate(self._allowed) if allowed and numbers[page] not in leader
        }
        ordered = [number for number in order if number in outside]
        return deque([*outside.difference(ordered), *ordered])

    def _shrink(self) -> None:
        """Make the directories at most as large as the cache."""
        if self._max_pages is None:
            return
        for directory in (self.lru, self._bit):
            while len(directory) > self._max_pages and (number := directory.evict()) is not None:
                if directory is self.leader:
                    self._left_leader(number)
                else:
                    self._release(number)

    def _left_leader(self, number: int) -> None:
        page = self._page_of[number]
        if page != _NONE and self._allowed[page]:
            self._outside.append(number)
        else:
            self._release(number)

    def _number_for(self, key: int) -> int:
        number = self._keys.get(key)
        if number is not None:
            self._keys.remove(number)
            return number
        if self._unused:
            number = self._unused.pop()
        else:
            number = len(self._page_of)
            self._page_of.append(_NONE)
            self.lru.grow()
            self._bit.grow()
        self._keys.note(key, number)
        return number

    def _release(self, number: int) -> None:
        """Forget a number that left a directory, if no directory and not the cache holds it."""
        if self._page_of[number] == _NONE and number not in self.lru and number not in self._bit:
            self._keys.remove(number)
            self._unused.append(number)


@paging_rule("learned", paper="arXiv:2210.02775")
def learned(
    pager: Annotated[str, "file of a predictor (millpond train pager); empty: the one of the package", FILE] = "",
) -> PagingRule:
    """Evict pages that a predictor calls safe to discard; as LRU where that was better lately.

    The predictor is refitted at each request.
    """
    return FollowTheBetter(PredictedBits.of_file(pager))
