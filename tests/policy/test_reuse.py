"""Shares of cached chunks to compute again, worked by hand (Cache-Craft, equations 3 to 14)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import OptionError
from millpond.policy.reuse import (
    check_pick,
    check_recompute,
    contextual_impact,
    pick_tokens,
    prefix_overlap,
    recompute_share,
)


def test_impact_by_hand() -> None:
    # a = 3 / (10 * 5) + 1 / (10 * 20) = .065, b = 6 / 100 = .06
    found = contextual_impact([3.0, 1.0], [5, 20], 6.0, 10)
    assert found == pytest.approx(1 / (1 + math.exp(-0.065 / 0.06)))
    assert contextual_impact([], [], 6.0, 10) == 0.5


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 500)), max_size=5), st.floats(1e-6, 1e3), st.integers(1, 500)
)
def test_impact_is_from_a_half_to_one(parts: list[tuple[float, int]], own: float, size: int) -> None:
    assert 0.5 <= contextual_impact([a for a, _ in parts], [n for _, n in parts], own, size) <= 1


def test_overlap_by_hand() -> None:
    old, received = ["a", "b", "c"], [1.0, 2.0, 5.0]
    assert prefix_overlap(old, received, ["a", "b", "c"]) == 1
    assert prefix_overlap(old, received, ["a", "c", "d"]) == pytest.approx(6 / 8)
    assert prefix_overlap(old, received, ["c", "b", "a"]) == 0  # every pair stands the other way round
    assert prefix_overlap(old, received, ["b", "a", "c"]) == pytest.approx(1 - 1 / 3)
    assert prefix_overlap(old, received, ["d"]) == 0
    assert prefix_overlap(["a"], [0.0], ["a"]) == 0


def test_a_chunk_stored_alone_overlaps_with_nothing_but_nothing() -> None:
    assert prefix_overlap([], [], ["a"]) == 0
    assert prefix_overlap([], [], []) == 1


@given(st.floats(0.5, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 3))
def test_the_share_falls_as_the_overlap_grows(impact: float, one: float, other: float, alpha: float) -> None:
    low, high = sorted([one, other])
    assert 0 <= recompute_share(impact, high, alpha) <= recompute_share(impact, low, alpha) <= 1
    assert recompute_share(impact, 1.0, alpha) == 0


def test_picks() -> None:
    scores = torch.tensor([0.1, 0.9, 0.0, 0.5, 0.4])
    assert pick_tokens("attention", scores, 5, 0.4).tolist() == [1, 3]
    assert pick_tokens("attention", scores, 5, 0.41).tolist() == [1, 3, 4]  # rounded up
    assert pick_tokens("deviation", scores, 5, 0.2).tolist() == [1]
    assert pick_tokens("head", scores, 5, 0.4).tolist() == [0, 1]
    assert pick_tokens("attention", torch.zeros(5), 5, 0.4).tolist() == [0, 1]  # stored alone: the seam
    assert pick_tokens("attention", scores, 5, 0.0).tolist() == []
    assert pick_tokens("random", scores, 5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert pick_tokens("random", None, 50, 0.2, 1).tolist() == pick_tokens("random", None, 50, 0.2, 1).tolist()
    assert pick_tokens("random", None, 50, 0.2, 1).tolist() != pick_tokens("random", None, 50, 0.2, 2).tolist()


@pytest.mark.parametrize("recompute", [-0.1, 1.1, "all", True, None, math.nan])
def test_shares_out_of_range(recompute: object) -> None:
    with pytest.raises(OptionError, match='must be "auto", or a share'):
        check_recompute(recompute)


def test_unknown_picks() -> None:
    with pytest.raises(OptionError, match="did you mean 'attention'"):
        check_pick("atention")
    check_pick("deviation")
    check_recompute("auto")
    check_recompute(0)
