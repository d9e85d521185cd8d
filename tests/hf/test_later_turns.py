"""A short question behind a text that was compressed stays whole; a long one is compressed with the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.entries import read_write
from tests.helpers.matrix.models import llama

TEXT, BUDGET = 80, 24


def kept_of_turn(method: str, turn: int, **options: Any) -> list[set[int]]:
    """What each KV head of the first layer holds of a turn behind a text, by place in the turn."""
    model = llama("gqa", torch.float32)
    ids = torch.randint(2, 96, (1, TEXT + turn), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), mp.compress(model, method, BUDGET, page_slots=8, **options) as cache:
        model(ids[:, :TEXT], cache=cache)
        model(ids[:, TEXT:], cache=cache)
        table = cache.layer_caches[0].table
        assert table is not None
        assert table.lengths()[0].sum() == 2 * BUDGET
        found = read_write.read(table, 0).positions
    return [{int(p) - TEXT for p in row if p >= TEXT} for row in found]


@pytest.mark.parametrize("method", ["knorm", "keydiff", "expected_attention", "compactor", "lagkv"])
def test_a_question_stays_whole(method: str) -> None:
    assert kept_of_turn(method, 7) == [set(range(7))] * 2


def test_a_text_does_not() -> None:
    assert all(0 < len(kept) < 20 for kept in kept_of_turn("knorm", 20))


def test_what_evicts_at_each_step_goes_by_its_own_window() -> None:
    kept = kept_of_turn("h2o", 10, recent=4, sinks=0)
    assert all({6, 7, 8, 9} <= own and len(own) < 10 for own in kept)
