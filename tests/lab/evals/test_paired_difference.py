"""Paired differences against numbers worked out by hand."""

from __future__ import annotations

import pytest

from millpond.errors import DataError
from millpond_lab.evals.decoding.record import Record
from millpond_lab.evals.harness.summary import difference


def records(scores: list[float], weight: float = 1.0, question: int = 0) -> list[Record]:
    return [Record("c", f"s{i}", question, "", score, weight, 10, 0.2, 20, 100) for i, score in enumerate(scores)]


def test_the_mean_is_over_tasks_of_the_mean_over_questions() -> None:
    found = difference(
        {"a": records([1, 1, 0, 1]), "b": records([1, 0])}, {"a": records([0, 0, 0, 1]), "b": records([1, 1])}, seed=7
    )
    assert found.mean == pytest.approx((2 / 4 - 1 / 2) / 2)
    assert found.n == 6
    assert found.low <= found.mean <= found.high


def test_it_sees_what_unpaired_intervals_would_not() -> None:
    hard = [0.1 * (i % 10) for i in range(40)]  # samples differ far more than candidates do
    found = difference({"t": records([score + 0.02 for score in hard])}, {"t": records(hard)}, seed=7)
    assert found.mean == pytest.approx(0.02)
    assert found.high - found.low < 0.01  # apart, means of such scores have intervals of 0.18 each
    assert found.verdict == "holds"


def test_numbers_without_bounds_are_resampled() -> None:
    nats = [0.1 * (i % 10) for i in range(40)]
    found = difference({"t": records([score + 0.02 for score in nats])}, {"t": records(nats)}, seed=7, shares=False)
    assert (found.low, found.high) == (pytest.approx(0.02), pytest.approx(0.02))
    assert found.verdict == "holds"


def test_the_interval_is_that_of_a_mean() -> None:
    # differences of +1 and -1 in equal parts: the mean of n of them has a deviation of 1 / sqrt(n)
    found = difference({"t": records([1, 0] * 50)}, {"t": records([0, 1] * 50)}, seed=7)
    assert found.low == pytest.approx(-0.196, abs=0.03)
    assert found.high == pytest.approx(0.196, abs=0.03)
    assert found.verdict == "no difference seen"


def test_samples_are_drawn_anew_in_each_task() -> None:
    swings = records([1, 0] * 50)
    one = difference({"t": swings}, {"t": records([0, 1] * 50)}, seed=7)
    two = difference({"t": swings, "u": swings}, {name: records([0, 1] * 50) for name in "tu"}, seed=7)
    assert (two.high - two.low) == pytest.approx((one.high - one.low) / 2**0.5, rel=0.1)


def test_the_order_does_not_count_and_the_sides_mirror() -> None:
    ours, theirs = records([1, 0.5, 0.2, 0.9] * 5), records([0.3, 0.5, 0.1, 0.4] * 5)
    found, back = difference({"t": ours}, {"t": theirs[::-1]}, 7), difference({"t": theirs}, {"t": ours}, 7)
    assert found == difference({"t": ours}, {"t": theirs}, 7)
    assert (back.mean, back.low, back.high) == pytest.approx((-found.mean, -found.high, -found.low))
    assert (found.verdict, back.verdict) == ("holds", "reversed")


def test_questions_of_one_sample_stay_together() -> None:
    ours = {"t": [*records([1, 0], question=0), *records([1, 0], question=1)]}
    theirs = {"t": [*records([0, 0], question=0), *records([0, 0], question=1)]}
    found = difference(ours, theirs, 7)
    assert (found.mean, found.n) == (0.5, 2)
    assert found == difference({"t": records([1, 0])}, {"t": records([0, 0])}, 7)


def test_equal_sides_differ_in_nothing() -> None:
    same = {"t": records([1, 0, 1])}
    found = difference(same, same, 7)
    assert (found.mean, found.low, found.n) == (0.0, -found.high, 3)
    assert found.high > 0.4  # three equal answers say little
    assert difference(same, same, 7).verdict == "no difference seen"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"t": records([1])}, {"u": records([1])}),
        ({"t": records([1, 1])}, {"t": records([1])}),
        ({"t": records([1])}, {"t": records([1], weight=2.0)}),
        ({"t": records([1])}, {"t": records([1], question=1)}),
    ],
)
def test_sides_that_answered_different_questions_are_not_compared(
    ours: dict[str, list[Record]], theirs: dict[str, list[Record]]
) -> None:
    with pytest.raises(DataError, match="same"):
        difference(ours, theirs, 7)
