"""LagKV: against a plain computation in loops, chunk by chunk; what has no reference; exact budgets."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.lagkv import LagRelative
from tests.helpers.papers.keyed import run, sets, text, view

lagkv = METHODS.get("lagkv")


def plain(x: Tensor, reference: Tensor) -> list[float]:
    """Softmax over the chunk x (n, D) of the deviation over channels, after min-max scaling by the reference."""
    spread = []
    for row in x:
        u = []
        for d in range(x.shape[1]):
            low, high = float(reference[:, d].min()), float(reference[:, d].max())
            u.append((float(row[d]) - low) / (high - low) if high > low else 0.0)
        mean = sum(u) / len(u)
        spread.append(math.sqrt(sum((a - mean) ** 2 for a in u) / (len(u) - 1)))
    total = sum(math.exp(s) for s in spread)
    return [math.exp(s) / total for s in spread]


def test_by_hand() -> None:
    """Chunks of two: {0, 1} by {2, 3}; channel ranges 0..2 and 0..4: u_0 = (1, 0), u_1 = (0.5, 0.5)."""
    keys = torch.tensor([[[2.0, 0.0], [1.0, 2.0], [0.0, 4.0], [2.0, 0.0]]])
    score = LagRelative(lag=2, across=True).score(view(keys, keys), 0)[0]
    e = math.exp(math.sqrt(0.5))
    assert score[:2].tolist() == pytest.approx([e / (e + 1), 1 / (e + 1)], abs=1e-6)
    assert 1 < score[2] < score[3]
    q = torch.zeros(1, 4, 2)
    assert sets(run(lagkv(lag=2, sinks=0), 3, q, keys, keys)) == [[0, 2, 3]]


@pytest.mark.parametrize("n", [26, 29])
def test_against_a_plain_computation(n: int) -> None:
    """Two sinks, chunks of six: {2..7} and {8..13} are scored, {14..19} too; {20..25} and the rest stay."""
    q, k, v = text(n=n)
    budget = n - 9  # three leave each of three chunks
    for h, held in enumerate(sets(run(lagkv(lag=6, sinks=2), budget, q, k, v))):
        expected = {0, 1, *range(20, n)}
        for start in (2, 8, 14):
            own, behind = slice(start, start + 6), slice(start + 6, start + 12)
            pairs = zip(plain(k[h, own], k[h, behind]), plain(v[h, own], v[h, behind]), strict=True)
            ranked = sorted(range(6), key=lambda i, s=[a + b for a, b in pairs]: -s[i])  # type: ignore[misc]
            expected |= {start + i for i in ranked[:3]}
        assert held == sorted(expected)


def test_across_takes_the_best_of_all_chunks() -> None:
    q, k, v = text(1, n=26)
    score = {}
    for start in (2, 8, 14):
        own, behind = slice(start, start + 6), slice(start + 6, start + 12)
        pairs = zip(plain(k[0, own], k[0, behind]), plain(v[0, own], v[0, behind]), strict=True)
        score |= {start + i: a + b for i, (a, b) in enumerate(pairs)}
    ranked = sorted(score, key=lambda j: -score[j])
    assert sets(run(lagkv(lag=6, sinks=2, across=True), 15, q, k, v)) == [sorted({0, 1, *ranked[:7], *range(20, 26)})]


def test_budgets_are_exact_and_chunks_even() -> None:
    q, k, v = text(n=50)
    for budget in range(20, 50):
        for held in sets(run(lagkv(lag=8, sinks=2), budget, q, k, v)):
            assert len(held) == budget
            counts = [sum(2 + 8 * c <= j < 10 + 8 * c for j in held) for c in range(5)]
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("n", "budget"), [(13, 8), (40, 8)])
def test_without_a_reference_or_room_the_newest_stay(n: int, budget: int) -> None:
    """13 < 2 + 2 * 6; and in 40 the newest chunk and its rest alone are 10."""
    q, k, v = text(n=n)
    assert sets(run(lagkv(lag=6, sinks=2), budget, q, k, v)) == [[0, 1, *range(n - 6, n)]] * 2


def test_channels_without_a_range_count_nothing() -> None:
    _, k, _ = text(1, n=18)
    k[:, 6:12, 0] = 3.0
    score = LagRelative(lag=6, across=True).score(view(k, k), 0)[0, :6]
    assert score.tolist() == pytest.approx(plain(k[0, :6], k[0, 6:12]), abs=1e-6)


def test_a_chunk_whose_followers_have_left_is_measured_by_the_next_that_is_there() -> None:
    _, k, v = text(1, n=24)
    there = [*range(6), *range(12, 24)]
    positions = torch.tensor([there], dtype=torch.int32)
    score = LagRelative(lag=6, across=True).score(view(k[:, there], v[:, there], positions, seen=24), 0)[0]
    pairs = zip(plain(k[0, :6], k[0, 12:18]), plain(v[0, :6], v[0, 12:18]), strict=True)
    assert score[:6].tolist() == pytest.approx([(a + b) / 2 for a, b in pairs], abs=1e-6)


def test_evicting_while_decoding_holds_the_budget_and_the_newest_chunk() -> None:
    q, k, v = text(n=60)
    cache = run(lagkv(lag=6, sinks=2, decode="evict"), 22, q, k, v, prompt=40)
    for held in sets(cache):
        assert len(held) == 22
        assert set(held) >= {0, 1, *range(50, 60)}
        counts = [sum(2 + 6 * c <= j < 8 + 6 * c for j in held) for c in range(8)]
        assert max(counts) - min(counts) <= 1


def test_a_chunk_of_one_is_refused() -> None:
    with pytest.raises(OptionError, match="lag=1 must be 2 to 16,777,216"):
        lagkv(lag=1)
