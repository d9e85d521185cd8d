"""MARK0 where pages follow others: a wrong 0 behind 1s does not keep the pages before it."""

from __future__ import annotations

import pytest

from millpond.cache.paging.predictor import PredictedBits
from millpond.cache.paging.rule import PageFacts
from millpond_lab.paging.marker import WITHIN_PHASE, Mark0


def discarded(bits: str) -> str:
    """Which pages of one request go before all others (1), by the bits that were predicted for them."""
    rule, found = Mark0(PredictedBits.of_file(""), 0), []
    for page, bit in enumerate(bits):
        facts = PageFacts(page, page - 1, 0, page, len(bits), len(bits), bit == "1")
        found.append(str(int(rule.rank(page, facts) >> WITHIN_PHASE == 0)))
    return "".join(found)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        ("0011", "0011"),  # as they should be
        ("100", "110"),  # a 0 uses one 1 up
        ("1100", "1111"),
        ("11000", "11110"),
        ("110001", "111101"),
        ("10100", "11110"),
        ("1010", "1111"),
        ("01010", "01111"),
        ("0001", "0001"),
        ("00", "00"),  # zeros in front owe nothing to the ones behind them
    ],
)
def test_a_zero_counts_as_one_while_ones_are_in_excess(bits: str, expected: str) -> None:
    assert discarded(bits) == expected


def test_the_excess_is_that_of_the_page_that_is_followed() -> None:
    """Two requests that begin alike: what one of them adds does not count for the other."""
    rule = Mark0(PredictedBits.of_file(""), 0)

    def say(page: int, parent: int, bit: bool) -> bool:
        return rule._discards(page, PageFacts(page, parent, 0, 0, 1, 1, bit))

    assert [say(0, -1, True), say(1, 0, True), say(2, 1, False), say(3, 2, False)] == [True] * 4
    assert [say(4, 0, False), say(5, 4, False)] == [True, False]
    assert say(6, -1, False) is False, "the first page of a request follows none"
