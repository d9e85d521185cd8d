"""Small traces for paging rules: pages alone, and requests of pages in a chain."""

from __future__ import annotations

import random
from collections.abc import Iterator

Requests = list[tuple[int, ...]]


def pages_at_random(n: int, pages: int, seed: int) -> Requests:
    """Requests of one page each, half of them to a few that are often used."""
    draw = random.Random(seed)
    return [(draw.randrange(pages) if draw.random() < 0.5 else draw.randrange(max(pages // 4, 1)),) for _ in range(n)]


def loop(n: int, pages: int) -> Requests:
    """The same pages over and over, the worst that LRU can meet."""
    return [(at % pages,) for at in range(n)]


def chains(n: int, seed: int, width: int = 4, depth: int = 5) -> Requests:
    """Requests that go down a tree at random; a page's key is its way."""
    draw = random.Random(seed)
    found = []
    for _ in range(n):
        key, path = 1, []
        for _ in range(draw.randint(1, depth)):
            key = key * (width + 1) + 1 + int(width * draw.random() ** 2)
            path.append(key)
        found.append(tuple(path))
    return found


def some() -> Iterator[tuple[str, Requests, int]]:
    """Traces of several kinds, each with a size of the cache."""
    yield "random pages", pages_at_random(1500, 40, 1), 12
    yield "loop", loop(1200, 21), 20
    yield "chains", chains(500, 2), 30
    yield "loop, then random", loop(600, 15) + pages_at_random(600, 15, 3) + loop(600, 15), 14
    yield "wide chains", chains(400, 4, width=9, depth=4), 60
