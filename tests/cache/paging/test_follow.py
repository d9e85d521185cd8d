"""Follow the better: never much worse than LRU, and as good as good bits."""

from __future__ import annotations

import random

import pytest

from millpond.cache.paging import PAGING
from millpond.cache.paging.follow import FollowTheBetter
from millpond.cache.paging.predicted_bits import PredictedBits
from millpond.cache.paging.replay import belady_bits, next_uses_of, replay
from tests.cache.paging.traces import Requests, chains, loop, some

TRACES = [pytest.param(requests, pages, id=name) for name, requests, pages in some()]
BITS = ("Belady", "inverted", "random", "all discard", "all keep", "used again", "good, then bad")


def bits_of(kind: str, requests: Requests, pages: int) -> list[bool]:
    best = replay(requests, PAGING.get("belady")(), pages, next_uses=next_uses_of(requests))
    right = belady_bits(requests, best.evicted, best.evicted_at)
    draw = random.Random(0)
    return {
        "Belady": right,
        "inverted": [not bit for bit in right],
        "random": [draw.random() < 0.5 for _ in right],
        "all discard": [True] * len(right),
        "all keep": [False] * len(right),
        "used again": [use is not None for use in next_uses_of(requests)],
        "good, then bad": [bit != (at > len(right) // 2) for at, bit in enumerate(right)],
    }[kind]


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(("requests_", "pages"), TRACES)
def test_it_is_never_much_worse_than_lru_whatever_the_bits(requests_: Requests, pages: int, kind: str) -> None:
    rule = FollowTheBetter(PredictedBits.of_file(""))
    outcome = replay(requests_, rule, pages, bits=bits_of(kind, requests_, pages))
    lru = replay(requests_, PAGING.get("lru")(), pages)
    assert outcome.misses <= 1.01 * lru.misses + 2 * pages
    assert rule.misses == outcome.misses
    assert rule.lru.misses == lru.misses, "the directory of LRU is LRU"


def test_good_bits_are_followed_and_bad_ones_left() -> None:
    requests, pages = loop(4000, 21), 20
    lru = replay(requests, PAGING.get("lru")(), pages).misses
    rule = FollowTheBetter(PredictedBits.of_file(""))
    assert replay(requests, rule, pages, bits=bits_of("Belady", requests, pages)).misses < 0.2 * lru
    assert rule.switches == 1
    requests, pages = chains(2500, 3), 40
    rule = FollowTheBetter(PredictedBits.of_file(""))
    replay(requests, rule, pages, bits=bits_of("good, then bad", requests, pages))
    assert rule.switches >= 2
    assert rule.leader is rule.lru


def test_what_it_predicts_itself_beats_lru_on_a_trace_with_one_thing_to_learn() -> None:
    """Long requests never come again, short ones do, one after another."""
    requests = []
    for at in range(3000):
        short = (10**6 + at % 30,)
        requests += [short, tuple(range(at * 50, at * 50 + 6))]
    rule, pages = FollowTheBetter(PredictedBits.of_file("")), 60
    lru = replay(requests, PAGING.get("lru")(), pages)
    outcome = replay(requests, rule, pages)
    assert lru.hits == 0
    assert outcome.hits > 0.8 * 3000


def test_it_forgets_what_nothing_holds() -> None:
    rule = FollowTheBetter(PredictedBits.of_file(""))
    pages = 10
    replay([(at,) for at in range(2000)], rule, pages, bits=[at % 2 == 0 for at in range(2000)])
    assert rule.n_known <= 3 * pages + 1
