"""Interface of a paging rule, and the rules that rank pages by a number.

A page is a block of a cache, known by a small whole number that its owner gives it and uses again once the page was
dropped. Pages form a forest: a page may be evicted while no page follows it and no request holds it. The owner says so
(`allow`, `forbid`); a rule chooses among those pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from heapq import heapify, heappop, heappush
from typing import NamedTuple

#: Bits of a page number inside an entry of the heap: 16.7 million pages.
PAGE_BITS = 24
#: Bits of a depth: 65,536 pages of one request differ in their order, deeper ones do not.
DEPTH_BITS = 16
_LAST_DEPTH = (1 << DEPTH_BITS) - 1
#: Rank of a page that is not held.
_GONE = (1 << 64) - 1


class PageFacts(NamedTuple):
    """Access of a request to a page.

    Attributes:
        key: Content of the page as a number of 64 bits; the same whenever the same content comes again.
        parent: Page number before it in the request; -1 for the first.
        request: Number of the request, counted from 0.
        depth: Number of pages before it in the request.
        length: Pages of the request.
        known: Pages of the request that were in the cache, all at its beginning.
        bit: Prediction by the caller, True for safe to discard; None if the rule predicts itself.
        next_use: Number of the next request that uses the page, in a replay; None if not known, or never.
        gain: What the access saved, against 1 for computing the page: 1 / CFO for a chunk (Cache-Craft).
    """

    key: int
    parent: int
    request: int
    depth: int
    length: int
    known: int
    bit: bool | None = None
    next_use: int | None = None
    gain: float = 1.0


class PagingRule(ABC):
    """Rule that chooses the page to evict. A request touches its pages in order, each once.

    Attributes:
        name: Name under which the rule is registered.
    """

    name: str

    @abstractmethod
    def touch(self, page: int, facts: PageFacts) -> None:
        """Record that a request used a page; it is new if it was dropped or never touched."""

    @abstractmethod
    def allow(self, page: int) -> None:
        """Allow a page to be evicted from now on."""

    @abstractmethod
    def forbid(self, page: int) -> None:
        """Forbid a page to be evicted until it is allowed again."""

    @abstractmethod
    def drop(self, page: int) -> None:
        """Forget a page, evicted or dropped for another reason; its number may be used again."""

    @abstractmethod
    def victim(self) -> int | None:
        """Return the page to evict next among those allowed; None if there is none."""


class RankedRule(PagingRule):
    """Rule that gives each page a rank at each access; the lowest rank is evicted first.

    A heap holds one entry for each page that may be evicted, and some that are out of date, which are skipped: a victim
    costs O(log n). A page takes 9 bytes, and about 40 more while it may be evicted.

    Attributes:
        n_pages: Pages that were touched and not dropped.
    """

    def __init__(self) -> None:
        self._ranks = array("Q")  # by page
        self._heap: list[int] = []  # rank and page in one number
        self._allowed = bytearray()
        self._n_allowed = 0
        self.n_pages = 0  # that were touched and not dropped

    @abstractmethod
    def rank(self, page: int, facts: PageFacts) -> int:
        """Return the rank of a page from now on, 0 to 2**64 - 2; ties go to the lower page number."""

    def touch(self, page: int, facts: PageFacts) -> None:
        """See `PagingRule`."""
        while page >= len(self._ranks):
            self._ranks.append(_GONE)
            self._allowed.append(0)
        self.n_pages += self._ranks[page] == _GONE
        self._ranks[page] = self.rank(page, facts)
        if self._allowed[page]:
            self._push(page)

    def allow(self, page: int) -> None:
        """See `PagingRule`."""
        if not self._allowed[page]:
            self._allowed[page] = 1
            self._n_allowed += 1
            self._push(page)

    def forbid(self, page: int) -> None:
        """See `PagingRule`."""
        if self._allowed[page]:
            self._allowed[page] = 0
            self._n_allowed -= 1

    def drop(self, page: int) -> None:
        """See `PagingRule`."""
        self.forbid(page)
        self._ranks[page] = _GONE
        self.n_pages -= 1

    def victim(self) -> int | None:
        """See `PagingRule`."""
        while self._heap:
            page = self._heap[0] & (1 << PAGE_BITS) - 1
            if self._allowed[page] and self._ranks[page] == self._heap[0] >> PAGE_BITS:
                return page
            heappop(self._heap)
        return None

    def rank_of(self, page: int) -> int:
        """Return the rank of a page since its last access."""
        return self._ranks[page]

    def _push(self, page: int) -> None:
        if len(self._heap) > 256 + 2 * self._n_allowed:
            self._heap = [
                rank << PAGE_BITS | number for number, rank in enumerate(self._ranks) if self._allowed[number]
            ]
            heapify(self._heap)
        else:
            heappush(self._heap, self._ranks[page] << PAGE_BITS | page)


def recency(facts: PageFacts) -> int:
    """Return a number that grows with each request.

    Within one request a page is more recent than later ones.
    """
    return facts.request << DEPTH_BITS | _LAST_DEPTH - min(facts.depth, _LAST_DEPTH)
