"""Layer budgets: exact totals under any clip, lines and tables, and what does not fit a model."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from millpond.errors import OptionError
from millpond.policy.layer_allocation import EvenLayers, LayerTable, Pyramid, apportion, split_budget
from tests.helpers.examples import examples

WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.7]), min_size=1, max_size=3).filter(any).map(tuple)
ALLOCATIONS = st.one_of(st.builds(Pyramid, st.sampled_from([1.0, 2.0, 20.0])), st.builds(LayerTable, WEIGHTS))


@settings(max_examples=examples(300))
@given(
    layers=ALLOCATIONS,
    budget=st.integers(1, 60),
    least=st.integers(0, 6),
    most=st.lists(st.integers(1, 60), min_size=3, max_size=8),
)
def test_totals_are_exact_within_bounds(layers: Pyramid | LayerTable, budget: int, least: int, most: list[int]) -> None:
    got = split_budget(layers, budget, least, most)
    assert sum(got) == budget * len(most)
    if sum(most) <= budget * len(most) or budget <= least:
        assert got == [budget] * len(most)
    else:
        assert all(min(least, m) <= n <= m for n, m in zip(got, most, strict=True))


@given(wanted=st.lists(st.floats(1, 50), min_size=1, max_size=9))
def test_rounding_moves_no_layer_by_a_whole_entry(wanted: list[float]) -> None:
    total = int(sum(wanted))
    got = apportion(wanted, total, 0, [200] * len(wanted))
    assert sum(got) == total
    assert all(abs(n - w * total / sum(wanted)) < 1 for n, w in zip(got, wanted, strict=True))


def test_a_layer_that_clips_gives_to_the_others_in_proportion() -> None:
    assert split_budget(LayerTable((4.0, 2.0, 1.0, 1.0)), 10, 0, [9, 99, 99, 99]) == [9, 15, 8, 8]  # 15.5, 7.75, 7.75
    assert split_budget(LayerTable((1.0, 0.0, 1.0)), 10, 4, [99] * 3) == [13, 4, 13]


def test_where_everything_fits_nothing_is_shared_out() -> None:
    assert split_budget(Pyramid(), 40, 0, [40, 40, 12]) == [40] * 3


def test_even_layers_clip_nothing() -> None:
    assert split_budget(EvenLayers(), 40, 0, [100, 20]) == [40, 40]


def test_one_layer_has_it_all() -> None:
    assert split_budget(Pyramid(), 10, 2, [100]) == [10]
    assert split_budget(LayerTable((5.0,)), 10, 2, [100]) == [10]


def test_few_weights_are_spread_over_the_layers() -> None:
    # weights 2, 1, 0, 0.5, 1: a mean of 0.9
    assert LayerTable((2.0, 0.0, 1.0)).wanted(9, 0, [99] * 5) == pytest.approx([20.0, 10.0, 0.0, 5.0, 10.0])


@pytest.mark.parametrize("weights", [(1.0, -1.0), (0.0, 0.0), (float("inf"),), (float("nan"),)])
def test_weights_that_make_no_sense(weights: tuple[float, ...]) -> None:
    with pytest.raises(OptionError, match="none may be negative or infinite"):
        LayerTable(weights)


def test_more_weights_than_layers() -> None:
    with pytest.raises(OptionError, match="3 layer weights for a model of 2 layers"):
        LayerTable((1.0, 1.0, 2.0)).check(2)


def test_beta_below_one() -> None:
    with pytest.raises(OptionError, match=r"beta=0\.5 must be at least 1"):
        Pyramid(0.5)
