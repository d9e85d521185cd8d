"""Follow the better: never much worse than LRU, and as good as good bits."""

from __future__ import annotations

import random

import pytest

from millpond.cache.paging import PAGING
from millpond.cache.paging.learned import FollowTheBetter
from millpond.cache.paging.predictor import PredictedBits
from millpond_lab.paging.replay import belady_bits, next_uses_of, replay
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


@pytest.mark.covering
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


def led(*, follows_bits: bool, misses: int, lead: float = 0.0, pages: int = 10, of_lru: int = 100) -> FollowTheBetter:
    """A rule behind so many misses of its own and of LRU, in the moment in which it chooses its leader."""
    rule = FollowTheBetter(PredictedBits.of_file(""))
    rule._max_pages, rule._follows_bits, rule._lead = pages, follows_bits, lead
    rule.misses, rule.lru.misses = misses, of_lru
    rule._choose_leader()
    return rule


@pytest.mark.parametrize(("misses", "returns"), [(101, False), (109, False), (110, True), (131, True)])
def test_it_returns_to_lru_where_its_excess_reaches_the_pages_of_the_cache(misses: int, returns: bool) -> None:
    """Of 10 pages, beyond 1.01 times the 100 misses of LRU; the miss that follows a return is counted with them."""
    rule = led(follows_bits=True, misses=misses, lead=1.0)
    assert (rule.leader is rule.lru) is returns
    assert rule.switches == returns


@pytest.mark.parametrize(("misses", "leaves"), [(90, True), (101, True), (102, False), (140, False)])
def test_it_leaves_lru_only_without_an_excess(misses: int, leaves: bool) -> None:
    rule = led(follows_bits=False, misses=misses, lead=1.0)
    assert (rule.leader is not rule.lru) is leaves


@pytest.mark.parametrize(
    ("lead", "bits_before", "bits_after"),
    [(0.19, False, False), (0.23, False, True), (-0.19, True, True), (-0.23, True, False), (0.0, True, True)],
)
def test_the_leader_changes_only_by_a_lead_of_a_fiftieth_of_the_pages(
    lead: float, bits_before: bool, bits_after: bool
) -> None:
    """0.2 of 10 pages, behind a twentieth that this access takes of what was before."""
    rule = led(follows_bits=bits_before, misses=100, lead=lead)
    assert (rule.leader is not rule.lru) is bits_after
    assert rule._lead == pytest.approx(lead * (1 - 1 / 20))
