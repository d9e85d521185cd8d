"""Finch by hand: attention of the question over the queries that can see an entry, shares of chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.errors import NumericsError, OptionError
from millpond.methods import METHODS
from millpond.methods.finch import QuestionAttention
from millpond.policy.policy import Policy
from millpond.policy.view import View
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.fixture import ROWS, run
from tests.helpers.papers.keyed import best, text
from tests.helpers.papers.keyed import run as run_text

finch = METHODS.get("finch")


def test_each_entry_by_the_queries_that_see_it() -> None:
    """Fixture F6 with a question of three: positions 0 to 3 are seen by three queries, 4 by two, 5 by one."""
    seen_by = [3, 3, 3, 3, 2, 1]
    value = [sum(row[j] for row in ROWS[3:] if j < len(row)) / n for j, n in enumerate(seen_by)]
    assert value[4] == pytest.approx((0.161377 + 0.022210) / 2)
    for budget in range(1, 7):
        assert run(finch(window=3, keep_question=False), budget) == best(value, budget)
    assert run(finch(window=3), 4) == best(value, 4, {3, 4, 5})
    unfair = [sum(row[j] for row in ROWS[3:] if j < len(row)) for j in range(6)]
    assert best(unfair, 2) != best(value, 2)


def test_a_question_longer_than_the_text() -> None:
    value = [sum(row[j] for row in ROWS if j < len(row)) / (6 - j) for j in range(6)]
    assert run(finch(window=50, keep_question=False), 3) == best(value, 3)


def test_chunks_keep_the_same_share() -> None:
    """Chunks of four: position 3 is protected, so the first has three free entries; 8 and 9 are a chunk of two."""
    signal = torch.tensor([[9.0, 7, 8, 9, 1, 2, 3, 4, 0.5, 0.1]])
    pinned = torch.zeros(1, 10, dtype=torch.bool)
    pinned[0, 3] = True
    positions = torch.arange(10, dtype=torch.int32)[None]
    view = View(positions, signal, 10, 0, pinned=pinned)
    found = QuestionAttention(window=1, chunk=4).score(view, 0)[0]
    places = {0: 0 / 3, 2: 1 / 3, 1: 2 / 3, 7: 0 / 4, 6: 1 / 4, 5: 2 / 4, 4: 3 / 4, 8: 0 / 2, 9: 1 / 2}
    for position, place in places.items():
        assert float(found[position]) == pytest.approx(-place)
    plan = Policy(score=QuestionAttention(window=1, chunk=4)).plan(View(positions, signal, 10, 0), 5)
    assert plan.keep[0].nonzero()[:, 0].tolist() == [0, 3, 6, 7, 8]  # two, two and one


def test_in_chunks_of_one_model_no_chunk_is_forgotten() -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    with torch.no_grad(), mp.compress(model, "finch", 12, window=4, chunk=9) as cache:
        model(ids, cache=cache)
        for layer in (0, 1):
            for head in cache.positions(layer):
                assert [sum(9 * c <= p < 9 * c + 9 for p in head if p < 36) for c in range(4)] == [2, 2, 2, 2]
                assert head[-4:] == [36, 37, 38, 39]


def test_nan_attention_is_reported_in_chunks_too() -> None:
    q, k, v = text()
    k[0, 3] = float("nan")
    with pytest.raises(NumericsError, match="layer 0"):
        run_text(finch(window=3, chunk=5), 12, q, k, v)


@pytest.mark.parametrize(("options", "message"), [({"window": 0}, "window=0 must"), ({"chunk": -1}, "chunk=-1 must")])
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        finch(**options)
