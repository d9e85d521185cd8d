"""Intervals against numbers from the literature and from formulas written out another way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from millpond_lab.evals.harness.summary import Z, bootstrap, paired_interval, share_interval, wilson


def of(right: int, n: int) -> np.ndarray:
    return np.array([1.0] * right + [0.0] * (n - right))


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [  # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_right_answers_have_wilsons_interval(right: int, n: int, low: float, high: float) -> None:
    found = share_interval(of(right, n))
    assert found.mean == right / n
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_two_hundred_of_two_hundred_is_not_certain() -> None:
    found = share_interval(of(200, 200))
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(200 / (200 + Z * Z))  # Wilson's lower end for k = n
    none = share_interval(of(0, 200))
    assert (none.mean, none.low, none.high) == pytest.approx((0.0, 0.0, 1 - found.low))


def test_shares_of_answers_count_as_their_variance_allows() -> None:
    halves = np.array([0.4, 0.6] * 50)
    found, coarse = share_interval(halves), share_interval(of(50, 100))
    assert found.mean == pytest.approx(coarse.mean)
    assert found.high - found.low < 0.45 * (coarse.high - coarse.low)
    # one answer that is a little less than right tells less of certainty than none, not more
    assert share_interval(np.array([1.0] * 199 + [0.75])).low < share_interval(of(200, 200)).low


def test_weights_that_double_an_answer_are_no_second_answer() -> None:
    once, twice = of(30, 40), np.full(40, 2.0)
    assert share_interval(once, twice).low == pytest.approx(share_interval(once).low)
    uneven = share_interval(of(30, 40), np.array([10.0] + [1.0] * 39))
    assert uneven.high - uneven.low > share_interval(once).high - share_interval(once).low


def test_pairs_have_bonett_and_prices_interval() -> None:
    only_first, only_second, both = 12, 3, 35
    n = only_first + only_second + both
    found = paired_interval(np.array([1.0] * only_first + [-1.0] * only_second + [0.0] * both))
    p, q = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = Z * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    assert found.mean == pytest.approx((only_first - only_second) / n)
    assert (found.low, found.high) == pytest.approx((p - q - half, p - q + half))


def test_equal_answers_leave_room_for_a_difference() -> None:
    found = paired_interval(np.zeros(80))
    assert found.mean == 0
    assert (found.low, found.high) == pytest.approx((-0.0338, 0.0338), abs=1e-4)
    assert paired_interval(np.array([-1.0, -1.0] + [0.0] * 78)).high > 0  # two of eighty: chance may do that


def test_small_differences_are_not_widened_by_whole_answers() -> None:
    eighths = np.array([0.125] * 10 + [-0.125] * 10 + [0.0] * 60)
    whole = paired_interval(8 * eighths)
    assert paired_interval(eighths).high == pytest.approx(whole.high / 8)


def test_what_tasks_differ_by_is_no_chance() -> None:
    easy, hard = np.full(40, 0.5), np.full(40, -0.5)
    both = np.concatenate([easy, hard])
    within = paired_interval(both, groups=np.repeat([0, 1], 40))
    across = paired_interval(both)
    assert within.mean == across.mean == 0
    assert within.high < 0.5 * across.high


def test_nothing_has_no_interval() -> None:
    for found in (share_interval(np.zeros(3), np.zeros(3)), paired_interval(np.zeros(3), np.zeros(3))):
        assert math.isnan(found.mean)
        assert math.isnan(found.low)


def test_the_interval_covers_what_is_true_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    for share in (0.5, 0.9, 0.98):
        shares = rng.binomial(40, share, 4000)
        covered = [wilson(right / 40, 40).low <= share <= wilson(right / 40, 40).high for right in shares]
        assert np.mean(covered) > 0.92


def test_the_bootstrap_is_seeded_and_the_same_in_any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, weights = np.arange(50.0), np.ones(50)
    first = bootstrap(sums, weights, 1)
    assert (first == bootstrap(sums, weights, 1)).all()
    assert (first != bootstrap(sums, weights, 2)).any()
    monkeypatch.setattr("millpond_lab.evals.harness.summary._AT_ONCE", 333)
    assert (first == bootstrap(sums, weights, 1)).all()
