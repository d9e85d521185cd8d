"""Replays: Belady's rule and MARK0 against references, and the bounds of the rules."""

from __future__ import annotations

import random
from functools import cache

import pytest

from millpond.cache.paging import PAGING
from millpond.cache.paging.predictor import PredictedBits
from millpond.errors import DataError, OptionError
from millpond_lab.paging.marker import Mark0, MarkAndPredict
from millpond_lab.paging.replay import ReplayResult, belady_bits, next_uses_of, phase_bits, replay
from tests.cache.paging.traces import Requests, chains, pages_at_random, some

TRACES = [pytest.param(requests, pages, id=name) for name, requests, pages in some()]


def belady(requests: Requests, pages: int) -> ReplayResult:
    return replay(requests, PAGING.get("belady")(), pages, next_uses=next_uses_of(requests))


def furthest_next_use(requests: Requests, pages: int) -> list[int]:
    """Accesses that miss under Belady's rule, each victim found by looking through all that follows."""
    held: dict[int, int] = {}  # key -> key before it
    missed, at = [], 0
    for number, path in enumerate(requests):
        for depth, key in enumerate(path):
            if key not in held:
                missed.append(at)
                if len(held) >= pages:
                    free = [k for k in held if k not in held.values() and k not in path]
                    if not free:
                        missed += range(at + 1, at + len(path) - depth)
                        at += len(path) - depth
                        break
                    del held[max(free, key=lambda k: next_use(requests, number, k))]
                held[key] = path[depth - 1] if depth else -1
            at += 1
    return missed


def next_use(requests: Requests, number: int, key: int) -> int:
    return next((n for n in range(number + 1, len(requests)) if key in requests[n]), len(requests))


@cache
def least_misses(requests: tuple[int, ...], pages: int, held: frozenset[int] = frozenset()) -> int:
    """The least misses of any choice of victims, by trying all."""
    if not requests:
        return 0
    first, rest = requests[0], requests[1:]
    if first in held:
        return least_misses(rest, pages, held)
    if len(held) < pages:
        return 1 + least_misses(rest, pages, held | {first})
    return 1 + min(least_misses(rest, pages, held - {victim} | {first}) for victim in held)


@pytest.mark.parametrize(
    ("requests_", "pages"),
    [(pages_at_random(200, 12, 5), 5), (chains(120, 6), 14), (chains(120, 7, width=7), 25), (chains(60, 8), 3)],
)
def test_belady_equals_a_reference_that_looks_ahead(requests_: Requests, pages: int) -> None:
    assert belady(requests_, pages).missed == furthest_next_use(requests_, pages)


@pytest.mark.parametrize("seed", range(6))
def test_belady_has_the_least_misses(seed: int) -> None:
    requests = pages_at_random(14, 6, seed)
    for pages in (1, 2, 3):
        assert belady(requests, pages).misses == least_misses(tuple(page for (page,) in requests), pages)


@pytest.mark.parametrize(("requests_", "pages"), TRACES)
def test_mark0_with_the_bits_of_belady_equals_it_hit_for_hit(requests_: Requests, pages: int) -> None:
    best = belady(requests_, pages)
    bits = belady_bits(requests_, best.evicted, best.evicted_at)
    assert any(bits)
    assert replay(requests_, PAGING.get("mark0")(), pages, bits=bits).missed == best.missed
    assert replay(requests_, PAGING.get("lru")(), pages).misses > best.misses


def harmonic(pages: int) -> float:
    return sum(1 / k for k in range(1, pages + 1))


def mean_misses(rule: type[Mark0 | MarkAndPredict], requests: Requests, pages: int, bits: list[bool]) -> float:
    """Over seeds of the rule; with the bits given it predicts nothing."""
    predicted = PredictedBits.of_file("")
    return sum(replay(requests, rule(predicted, seed), pages, bits=bits).misses for seed in range(12)) / 12


@pytest.mark.parametrize("flipped", [0.0, 0.05, 0.3, 0.5, 1.0])
def test_mark0_keeps_its_bound(flipped: float) -> None:
    requests, pages = pages_at_random(600, 24, 9), 8
    best = belady(requests, pages)
    right = belady_bits(requests, best.evicted, best.evicted_at)
    draw = random.Random(1)
    bits = [bit != (draw.random() < flipped) for bit in right]
    wrong_0 = sum(true and not bit for true, bit in zip(right, bits, strict=True))
    wrong_1 = sum(bit and not true for true, bit in zip(right, bits, strict=True))
    misses = mean_misses(Mark0, requests, pages, bits)
    assert misses <= best.misses + 2 * harmonic(pages) * wrong_0 + wrong_1
    assert flipped > 0.05 or misses <= 1.2 * best.misses


@pytest.mark.parametrize("wrong", [2, 3, 4])
def test_mark0_is_not_held_up_by_a_wrong_0_behind_pages_to_discard(wrong: int) -> None:
    """A chain that is never used again, of whose bits one is wrong; then 7 comes, stays, and is used again after 8."""
    requests, bits = [(1, 2, 3, 4, 5), (7,), (8,), (7,)], [True] * 5 + [False, True, True]
    bits[wrong] = False
    for seed in range(20):
        assert replay(requests, Mark0(PredictedBits.of_file(""), seed), 6, bits=bits).missed == [*range(7)]


def test_mark0_keeps_most_of_what_the_bits_are_worth_where_pages_follow_others() -> None:
    draw, requests = random.Random(6), list[tuple[int, ...]]()
    for at in range(600):  # 25 beginnings of 4 pages, each with an end of 8 pages of its own
        first = 10 * draw.randrange(25)
        requests.append((*range(first, first + 4), *range(10000 + 8 * at, 10008 + 8 * at)))
    pages = 90
    best, lru = belady(requests, pages), replay(requests, PAGING.get("lru")(), pages)
    bits = [bit != (draw.random() < 0.05) for bit in belady_bits(requests, best.evicted, best.evicted_at)]
    found = replay(requests, PAGING.get("mark0")(), pages, bits=bits)
    assert found.hits - lru.hits > 0.75 * (best.hits - lru.hits)


@pytest.mark.parametrize("flipped", [0.0, 0.3, 1.0])
def test_mark_predict_keeps_its_bounds(flipped: float) -> None:
    requests, pages = pages_at_random(600, 24, 10), 8
    best = belady(requests, pages).misses
    right = phase_bits(requests, pages)
    draw = random.Random(2)
    bits = [bit != (draw.random() < flipped) for bit in right]
    wrong_0 = sum(true and not bit for true, bit in zip(right, bits, strict=True))
    wrong_1 = sum(bit and not true for true, bit in zip(right, bits, strict=True))
    misses = mean_misses(MarkAndPredict, requests, pages, bits)
    assert misses <= 2 * best + harmonic(pages) * wrong_0 + wrong_1
    assert misses <= 2 * harmonic(pages) * best + pages  # whatever the bits: it marks
    if not flipped:
        assert misses < replay(requests, PAGING.get("marker")(), pages).misses


def test_marker_keeps_its_bound_where_lru_fails() -> None:
    requests, pages = [(at % 11,) for at in range(800)], 10
    assert replay(requests, PAGING.get("lru")(), pages).hits == 0
    misses = [replay(requests, PAGING.get("marker")(seed=seed), pages).misses for seed in range(8)]
    assert sum(misses) / 8 <= 2 * harmonic(pages) * belady(requests, pages).misses
    assert max(misses) < 0.6 * len(requests)
    assert len(set(misses)) > 1


def test_lfu_keeps_what_is_used_often_and_lru_what_was_used_lately() -> None:
    requests = [(1,), (1,), (1,), (2,), (2,), (3,), (4,), (1,), (2,)]
    assert replay(requests, PAGING.get("lfu")(), 3).missed == [0, 3, 5, 6]
    assert replay(requests, PAGING.get("lru")(), 3).missed == [0, 3, 5, 6, 7, 8]


@pytest.mark.parametrize("rule", PAGING.names())
def test_a_request_longer_than_the_cache_keeps_its_beginning(rule: str) -> None:
    requests = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (9,), (1, 2)]
    outcome = replay(requests, PAGING.get(rule)(), 3, next_uses=next_uses_of(requests))
    assert outcome.missed[:7] == [0, 1, 2, 3, 4, 8, 9]
    assert outcome.evicted == [3], "the last page goes first"
    assert outcome.accesses == 13


def test_what_a_replay_refuses() -> None:
    with pytest.raises(OptionError, match="pages=0 must be at least 1"):
        replay([(1,)], PAGING.get("lru")(), 0)
    with pytest.raises(DataError, match="request 1: page 2 follows other pages than before"):
        replay([(1, 2), (3, 2)], PAGING.get("lru")(), 5)
