"""Hit rates of paging rules on traces, at several sizes of the cache, and the cost of a victim."""

from __future__ import annotations

import gc
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from millpond.cache.paging import PAGING
from millpond.cache.paging.rule import PageFacts, PagingRule
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.paging.candidates import PagingTrace
from millpond_lab.bench.paging.trace_paths import read_paths

#: Pages of a request in the measurement of costs.
_PATH = 20
#: Requests whose victims are timed.
_TIMED = 500


@dataclass(frozen=True, slots=True)
class RuleCost:
    """Time and memory of one rule at one size.

    Attributes:
        victim_us: median time of choosing a page. victim_99_us: 99th percentile. touch_us: median time of
            an access, over requests. bytes_per_page: memory that the rule takes as the cache fills, over its pages.
        timed: victims.
    """

    rule: str
    pages: int
    victim_us: float
    victim_99_us: float
    touch_us: float
    bytes_per_page: float
    timed: int


def run(
    traces: Sequence[str],
    sizes: Sequence[int],
    candidates: Sequence[str],
    *,
    cost_pages: int = 100_000,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Replay each trace ("KIND:PATH") under each candidate at each size; cost_pages: size at which rules are timed."""
    results = []
    for name in traces:
        requests = read_paths(name)
        accesses = sum(map(len, requests))
        distinct = len({key for path in requests for key in path})
        for pages in sizes:
            trace = PagingTrace(requests, pages)
            for candidate in candidates:
                progress(f"{name}, {pages:,} pages, {candidate}")
                outcome = trace.run(candidate)
                results.append(
                    {
                        "trace": name.rpartition("/")[2].rpartition(":")[2],
                        "requests": len(requests),
                        "accesses": accesses,
                        "distinct": distinct,
                        "pages": pages,
                        "rule": candidate,
                        "hits": outcome.hits,
                        "hit_rate": outcome.hit_rate,
                        "misses": outcome.misses,
                        "bound": trace.bound(candidate),
                    }
                )
    rules = dict.fromkeys(name.partition(",")[0] for name in candidates)
    costs = []
    for rule in rules:
        if cost_pages:
            progress(f"cost of {rule}")
            costs.append(asdict(cost_of(rule, cost_pages)))
    machine = describe_machine()
    return {
        "benchmark": "paging",
        "hardware": machine.hardware,
        "software": machine.software,
        "results": results,
        "costs": costs,
    }


def cost_of(rule: str, pages: int, timed: int = _TIMED) -> RuleCost:
    """Time of victims and of accesses in a full cache of `pages` pages in requests of 20.

    timed: requests whose victims and accesses are timed.
    """
    requests = max(pages // _PATH, 2)
    chosen = PAGING.get(rule)()
    load = _Load(chosen, requests * _PATH)
    gc.collect()
    tracemalloc.start()
    for _ in range(requests):
        load.request()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    victims, touches = [], []
    for _ in range(timed):
        for _ in range(_PATH):
            begin = time.perf_counter()
            page = chosen.victim()
            victims.append(time.perf_counter() - begin)
            assert page is not None, "a full cache has pages that may be evicted"
            load.evict(page)
        begin = time.perf_counter()
        load.request()
        touches.append((time.perf_counter() - begin) / _PATH)
    spread = quantiles(victims, n=100)
    return RuleCost(
        rule,
        requests * _PATH,
        spread[49] * 1e6,
        spread[98] * 1e6,
        median(touches) * 1e6,
        size / (requests * _PATH),
        len(victims),
    )


class _Load:
    """Requests of new pages in a chain; of each the last page may be evicted, then the one before it, and so on."""

    def __init__(self, rule: PagingRule, pages: int) -> None:
        self._rule = rule
        self._parents = array("i", [-1]) * pages
        self._unused: list[int] = []
        self._requests = self._touched = self._pages = 0

    def request(self) -> None:
        """One request of new pages."""
        parent = -1
        for depth in range(_PATH):
            page = self._unused.pop() if self._unused else self._pages
            self._pages = max(self._pages, page + 1)
            self._touched += 1
            self._parents[page] = parent
            self._rule.touch(page, PageFacts(self._touched, parent, self._requests, depth, _PATH, 0))
            parent = page
        self._rule.allow(parent)
        self._requests += 1

    def evict(self, page: int) -> None:
        """The rule's victim goes."""
        self._rule.drop(page)
        self._unused.append(page)
        if self._parents[page] >= 0:
            self._rule.allow(self._parents[page])
