"""Any rule: victims are pages that may be evicted, whatever is touched, allowed, forbidden and dropped."""

from __future__ import annotations

import random

import pytest

from millpond.cache.paging import PAGING, list_paging_rules
from millpond.cache.paging.rule import PageFacts
from millpond_lab.bench.paging.run import cost_of

RULES = PAGING.names()


def test_the_rules() -> None:
    assert list_paging_rules() == ["belady", "craft", "learned", "lfu", "lru", "mark0", "mark_predict", "marker"]
    assert all(PAGING.get(name)().name == name for name in RULES)


@pytest.mark.covering
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_a_victim_is_a_page_that_may_be_evicted(name: str, seed: int) -> None:
    """A forest that grows and shrinks at random, with pages in use."""
    rule, draw = PAGING.get(name)(), random.Random(seed)
    parents: dict[int, int] = {}
    keys: dict[int, int] = {}
    allowed: set[int] = set()
    unused = list(range(60))
    for request in range(400):
        path = _path(draw, parents, keys)
        for depth, page in enumerate(path):
            facts = PageFacts(keys[page], parents[page], request, depth, len(path) + 3, len(path))
            rule.touch(page, facts)
        for depth in range(len(path), len(path) + draw.randint(0, 3)):
            parent = path[-1] if path else -1
            if parent in allowed:
                rule.forbid(parent)
                allowed.discard(parent)
            if not unused:
                break
            page = unused.pop()
            parents[page], keys[page] = parent, draw.getrandbits(64)
            rule.touch(page, PageFacts(keys[page], parent, request, depth, len(path) + 3, depth))
            path.append(page)
        for page in draw.sample(sorted(parents), len(parents) // 2):
            if page not in parents.values() and page not in allowed:
                rule.allow(page)
                allowed.add(page)
        for page in draw.sample(sorted(allowed), len(allowed) // 4):
            rule.forbid(page)
            allowed.discard(page)
        for _ in range(draw.randint(0, 4) if len(parents) < 50 else 12):
            victim = rule.victim()
            assert (victim is None) == (not allowed)
            if victim is None:
                break
            assert victim in allowed
            assert rule.victim() == victim, "it stays the victim until something changes"
            _drop(rule, victim, parents, keys, allowed, unused)
        if allowed and draw.random() < 0.3:  # for a reason of the owner's
            _drop(rule, draw.choice(sorted(allowed)), parents, keys, allowed, unused)


def _path(draw: random.Random, parents: dict[int, int], keys: dict[int, int]) -> list[int]:
    """From a first page down to one of those that are there."""
    if not parents or draw.random() < 0.3:
        return []
    page, path = draw.choice(sorted(parents)), []
    while page >= 0:
        path.append(page)
        page = parents[page]
    return path[::-1]


def _drop(
    rule: object, page: int, parents: dict[int, int], keys: dict[int, int], allowed: set[int], unused: list[int]
) -> None:
    rule.drop(page)  # type: ignore[attr-defined]
    allowed.discard(page)
    del parents[page], keys[page]
    unused.append(page)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RULES if name != "belady"])
def test_a_rule_takes_at_most_64_bytes_for_a_page(name: str) -> None:
    cost = cost_of(name, 4000, timed=3)
    assert 8 < cost.bytes_per_page <= 64
    assert cost.pages == 4000


def test_a_rule_of_few_steps_keeps_its_heap_small() -> None:
    """Old entries of pages that are used again and again do not pile up."""
    rule = PAGING.get("lru")()
    for request in range(5000):
        page = request % 5
        rule.touch(page, PageFacts(page, -1, request, 0, 1, 1))
        rule.allow(page)
    assert len(rule._heap) <= 300  # type: ignore[attr-defined]
    assert rule.victim() == 0
