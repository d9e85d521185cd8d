"""Replay of a trace of requests through a cache of pages: the hits of a rule, and Belady's, which knows the future."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millpond.cache.paging import paging_rule
from millpond.cache.paging.rule import DEPTH_BITS, PageFacts, PagingRule, RankedRule, recency
from millpond.errors import DataError, OptionError

#: Keys of the pages of a request, in their order; a key stands for a page and all before it.
Path = Sequence[int]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Accesses of a replay.

    Attributes:
        missed: numbers of the accesses that were no hits.
        evicted: keys in the order in which they were evicted.
        evicted_at: numbers of the accesses that evicted them.
    """

    accesses: int
    missed: list[int]
    evicted: list[int]
    evicted_at: list[int]

    @property
    def misses(self) -> int:
        """Number of accesses that were no hits."""
        return len(self.missed)

    @property
    def hits(self) -> int:
        """Number of accesses whose page was there."""
        return self.accesses - self.misses

    @property
    def hit_rate(self) -> float:
        """Share of the accesses."""
        return self.hits / self.accesses


def replay(
    requests: Iterable[Path],
    rule: PagingRule,
    pages: int,
    *,
    bits: Sequence[bool] | None = None,
    next_uses: Sequence[int | None] | None = None,
) -> ReplayResult:
    """Run requests one after another through an empty cache of `pages` pages that evicts by `rule`.

    A page comes in when it is used and was not there; a page is never evicted before those that follow it, nor while
    its request runs. What does not fit because the request itself fills the cache does not come in.

    Args:
        bits: for each access, whether its page is safe to discard afterwards; None: the rule predicts.
        next_uses: for each access, the number of the next request that uses its page, see `next_uses_of`.

    Raises:
        OptionError: a cache of no pages. DataError: a page follows different pages in different requests.
    """
    if pages < 1:
        raise OptionError(f"pages={pages} must be at least 1")
    held = _HeldPages(rule, pages)
    missed: list[int] = []
    at = 0
    for number, path in enumerate(requests):
        known = held.known(path)
        parent = -1
        held.hold(path[:known])
        for depth, key in enumerate(path):
            page = held.page_of.get(key)
            if page is None:
                missed.append(at)
                page = held.add(key, parent, at)
            elif held.parents[page] != parent:
                raise DataError(f"request {number}: page {key} follows other pages than before")
            if page is None:
                missed += range(at + 1, at := at + len(path) - depth)
                break
            bit = None if bits is None else bits[at]
            next_use = None if next_uses is None else next_uses[at]
            rule.touch(page, PageFacts(key, parent, number, depth, len(path), known, bit, next_use))
            parent, at = page, at + 1
        held.release()
    return ReplayResult(at, missed, held.evicted, held.evicted_at)


def next_uses_of(requests: Sequence[Path]) -> list[int | None]:
    """For each access, the number of the next request that uses the same page; None: none does."""
    found: list[int | None] = []
    later: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        for key in reversed(requests[number]):
            found.append(later.get(key))
        later.update(dict.fromkeys(requests[number], number))
    return found[::-1]


def belady_bits(requests: Sequence[Path], evicted: Sequence[int], evicted_at: Sequence[int]) -> list[bool]:
    """For each access, whether the run that evicted these pages at these accesses did so before their next use."""
    bits: list[bool] = []
    last: dict[int, int] = {}
    leaving = iter(zip(evicted_at, evicted, strict=True))
    due = next(leaving, None)
    for path in requests:
        for key in path:
            while due is not None and due[0] <= len(bits):
                bits[last[due[1]]] = True
                due = next(leaving, None)
            last[key] = len(bits)
            bits.append(False)
    return bits


def phase_bits(requests: Sequence[Path], pages: int) -> list[bool]:
    """For each access, whether its page is not used in the next phase (arXiv:2210.02775, section 5).

    A phase is a longest run of accesses to at most `pages` different pages.
    """
    phases: list[set[int]] = [set()]
    phase_of: list[int] = []
    for path in requests:
        for key in path:
            if key not in phases[-1] and len(phases[-1]) == pages:
                phases.append(set())
            phases[-1].add(key)
            phase_of.append(len(phases) - 1)
    phases.append(set())
    keys = (key for path in requests for key in path)
    return [key not in phases[phase + 1] for key, phase in zip(keys, phase_of, strict=True)]


class _HeldPages:
    """Pages of a cache of fixed size, with their parents, and the rule that evicts them."""

    def __init__(self, rule: PagingRule, most: int) -> None:
        self._rule, self._most = rule, most
        self.page_of: dict[int, int] = {}
        self.parents: list[int] = []
        self.evicted: list[int] = []
        self.evicted_at: list[int] = []
        self._keys: list[int] = []
        self._followers: list[int] = []
        self._in_use: list[int] = []  # pages of the request that runs

    def known(self, path: Path) -> int:
        """Pages that the cache holds, from the beginning of a request."""
        return next((at for at, key in enumerate(path) if key not in self.page_of), len(path))

    def hold(self, path: Path) -> None:
        """A request uses pages that are there."""
        self._in_use = [self.page_of[key] for key in path]
        if path:
            self._rule.forbid(self._in_use[-1])

    def add(self, key: int, parent: int, at: int) -> int | None:
        """A page for a request that runs; None: there is none that may be evicted for it."""
        if len(self._keys) < self._most:
            page = len(self._keys)
            self._keys.append(key)
            self.parents.append(parent)
            self._followers.append(0)
        else:
            victim = self._rule.victim()
            if victim is None:
                return None
            page = victim
            self._evict(page, at)
            self._keys[page], self.parents[page] = key, parent
        self.page_of[key] = page
        self._in_use.append(page)
        if parent >= 0:
            self._followers[parent] += 1
        return page

    def release(self) -> None:
        """The request ended."""
        for page in self._in_use:
            if not self._followers[page]:
                self._rule.allow(page)
        self._in_use = []

    def _evict(self, page: int, at: int) -> None:
        self._rule.drop(page)
        self.evicted.append(self._keys[page])
        self.evicted_at.append(at)
        del self.page_of[self._keys[page]]
        parent = self.parents[page]
        if parent >= 0:
            self._followers[parent] -= 1
            if not self._followers[parent] and parent not in self._in_use:
                self._rule.allow(parent)


#: Later than any request.
_NEVER = 1 << 47


class Belady(RankedRule):
    """Ranks pages by their next use, the furthest first; pages that are not used again by their last access.

    Least misses of all rules where every page must come in when it is used (Belady, 1966). A page is used whenever one
    behind it is, so that the furthest next use is that of a page that none follows.
    """

    name = "belady"

    def rank(self, page: int, facts: PageFacts) -> int:
        """See `RankedRule`."""
        if facts.next_use is None:
            return recency(facts) & (1 << DEPTH_BITS) - 1
        return _NEVER - facts.next_use << DEPTH_BITS | recency(facts) & (1 << DEPTH_BITS) - 1


@paging_rule("belady")
def belady() -> PagingRule:
    """Evict the page whose next use is furthest away: the best a rule can do, in a replay of a trace."""
    return Belady()
