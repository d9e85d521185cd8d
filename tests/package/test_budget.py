"""Budgets: what a user may write, and what is refused with a way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millpond.budget import DEFAULT, Budget, parse_bytes
from millpond.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("20%", "ratio", 0.2),
        (" 12.5 % ", "ratio", 0.125),
        ("100%", "ratio", 1.0),
        (0.5, "ratio", 0.5),
        (512, "tokens", 512),
        ("512", "tokens", 512),
        ("512 tokens", "tokens", 512),
        ("64MiB", "bytes", 64 * 2**20),
        ("64 mb", "bytes", 64 * 10**6),
        ("1.5GiB", "bytes", 3 * 2**29),
        ("100b", "bytes", 100),
        ("0.2", "ratio", 0.2),
        (".2", "ratio", 0.2),
        ("1.0", "ratio", 1.0),
        (np.int64(512), "tokens", 512),
        (np.uint8(64), "tokens", 64),
        (np.array(512), "tokens", 512),
        (np.float64(0.25), "ratio", 0.25),
        (np.float32(0.5), "ratio", 0.5),
        (torch.tensor(512), "tokens", 512),
        (torch.tensor(0.25), "ratio", 0.25),
    ],
)
def test_what_a_user_may_write(text: str | int | float, kind: str, amount: float) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.amount) == (kind, amount)
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize(
    "text",
    [
        "",
        "much",
        "-5",
        "0",
        "0%",
        "101%",
        0,
        -1,
        0.0,
        1.5,
        float("nan"),
        "1.5",
        "512.0",
        "12 parsecs",
        True,
        "0b",
        np.int64(0),
        np.bool_(True),
        torch.tensor([512]),
        np.array([0.2]),
        [512],
        (0.2,),
        {},
        None,
        b"20%",
        "64MiB, at least 512",
        "512, at least 64",
    ],
)
def test_what_is_refused(text: Any) -> None:
    with pytest.raises(BudgetError, match=r"write|unknown unit"):
        Budget.parse(text)


@given(st.floats(0.001, 1.0), st.integers(1, 100_000))
def test_a_ratio_rounds_to_the_nearest_entry(share: float, seen: int) -> None:
    entries = Budget.parse(share).entries(seen)
    assert 1 <= entries <= seen
    assert entries == 1 or abs(entries - share * seen) <= 0.5 + 1e-9 * seen


def test_tokens_do_not_depend_on_the_prompt() -> None:
    assert Budget.parse(64).entries(10) == Budget.parse("64").entries(10_000) == 64


def test_bytes_mean_nothing_without_a_cache() -> None:
    with pytest.raises(BudgetError, match="turned into tokens"):
        Budget.parse("1MiB").entries(100)


@pytest.mark.parametrize("text", ["20%", 0.25, 512, "64MiB", "20%, at least 512"])
def test_reads_back_what_it_writes(text: str | int | float) -> None:
    budget = Budget.parse(text)
    assert Budget.parse(str(budget).replace(" bytes", "b")) == budget


def test_the_default_is_a_fifth_and_at_least_512() -> None:
    assert Budget.parse("20%, at least 512") == Budget.parse(" 20 %,at least 512") == DEFAULT
    assert [DEFAULT.entries(seen) for seen in (1, 37, 2560, 2565, 10_000)] == [512, 512, 512, 513, 2000]


def test_amounts_of_bytes() -> None:
    assert parse_bytes("2KiB") == parse_bytes(2048) == parse_bytes(np.int32(2048)) == 2048
    with pytest.raises(BudgetError, match="not an amount of bytes"):
        parse_bytes("20%")
    with pytest.raises(BudgetError):
        parse_bytes(0)
