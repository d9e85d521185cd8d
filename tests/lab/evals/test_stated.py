"""An answer states a fact however it writes a date or a number, and not by a longer number that holds it."""

from __future__ import annotations

import pytest

from millpond_lab.evals.stated import stated

DATE = "8 June 1905"


@pytest.mark.parametrize(
    "answer",
    [
        "The old bridge was opened on 8 June 1905.",
        "It was opened on the 8th of June 1905",
        "it was opened on the 8th of june, 1905",
        "On June 8, 1905, it was opened.",
        "On June 8th 1905.",
        "June the 8th, 1905",
        "08 June 1905",
        "1905-06-08",
        "8\nJune\n1905",
        "**8 June 1905**",
    ],
)
def test_a_date_counts_however_it_is_written(answer: str) -> None:
    assert stated([DATE], answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["18 June 1905", "On June 18, 1905", "8 June 19051", "8 July 1905", "1905-08-06", "June 1905", "1905-16-08", ""],
)
def test_another_date_does_not(answer: str) -> None:
    assert stated([DATE], answer) == 0.0


@pytest.mark.parametrize(
    ("reference", "answer", "score"),
    [
        ("3276", "The value is 3276.", 1.0),
        ("3276", "The value is 3,276.", 1.0),
        ("3276", "The value is 32768.", 0.0),
        ("3276", "The value is 13276.", 0.0),
        ("3276", "The values are 3, 276.", 0.0),
        ("327-610", "It is **327-610**.", 1.0),
        ("327-610", "It is 327\u2013610.", 1.0),
        ("327-610", "It is 1327-610.", 0.0),
        ("Velmar Okotin", "velmar  okotin's lamp", 1.0),
        ("Velmar", "Velmarin", 0.0),
        ("ISE_LIMIT = 5", "ise_limit = 5", 1.0),
        ("+4", "it is 3+4.", 1.0),
    ],
)
def test_numbers_and_names_are_whole(reference: str, answer: str, score: float) -> None:
    assert stated([reference], answer) == score


def test_all_references_are_wanted() -> None:
    assert stated(["Velmar", "3276"], "Velmar has 3276") == 1.0
    assert stated(["Velmar", "3276"], "Velmar has none") == 0.0
