"""DMS by hand: what lies below a threshold leaves, and the budget is the most that stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.policy.head_allocation import AboveThreshold
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.fixture import COLUMN_SUMS, run

dms = METHODS.get("dms")
VALUE = torch.tensor([[0.9, 0.5, 0.2, 0.7], [0.1, 0.3, 0.2, 0.0], [0.6, 0.6, 9.0, 9.0]])
VALID = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])
PINNED = torch.tensor([[False] * 4, [False, False, False, True], [False] * 4])


@pytest.mark.parametrize(
    ("threshold", "budget", "expected"),
    [
        (0.5, 4, [3, 1, 2]),
        (0.6, 4, [2, 1, 2]),  # not lower than the threshold
        (0.25, 4, [3, 2, 2]),
        (9.5, 4, [1, 1, 1]),  # a head is never empty
        (-1.0, 4, [4, 4, 2]),
        (0.0, 2, [3, 1, 2]),  # ten lie above, six may stay: 0.9, 0.7, 0.6, 0.6, 0.5 and the protected one
        (0.5, 1, [1, 1, 1]),
    ],
)
def test_counts_by_hand(threshold: float, budget: int, expected: list[int]) -> None:
    assert AboveThreshold(threshold).keep_counts(VALUE, VALID, PINNED, budget).tolist() == expected


@pytest.mark.parametrize(
    ("threshold", "expected"), [(1.0, [0, 1, 5]), (0.7, [0, 1, 2, 3, 5]), (0.8, [0, 1, 2, 5]), (9.0, [5])]
)
def test_column_sums_against_a_threshold(threshold: float, expected: list[int]) -> None:
    """Fixture F6; the newest is in the window."""
    assert sorted({5, *(j for j, s in enumerate(COLUMN_SUMS) if s >= threshold)}) == expected
    assert run(dms(threshold=threshold, score="h2o", window=1), 6) == expected
    assert run(dms(threshold=threshold, score="h2o", window=1), 2) == expected[:1] + [5] * (len(expected) > 1)


def lengths(budget: Any, **options: Any) -> list[list[int]]:
    model, (ids, _) = llama("gqa"), prompts(1)
    with torch.no_grad(), mp.compress(model, "dms", budget, window=4, **options) as cache:
        model(ids, cache=cache)
        cache.check_integrity()
        return [[len(head) for head in cache.positions(layer)] for layer in (0, 1)]


def test_auto_meets_the_budget_of_each_layer() -> None:
    assert [sum(row) for row in lengths(12, score="h2o")] == [24, 24]


def test_a_threshold_lets_the_text_decide_below_the_budget() -> None:
    alone = lengths("100%", score="h2o", threshold=1.0)
    assert all(4 < n < 40 for row in alone for n in row)
    assert len({n for row in alone for n in row}) > 1
    assert lengths(max(map(sum, alone)), score="h2o", threshold=1.0) == alone
    tight = min(sum(row) for row in alone) // 2 - 2
    assert [sum(row) for row in lengths(tight, score="h2o", threshold=1.0)] == [2 * tight] * 2


def test_memory_follows_the_threshold() -> None:
    model, (ids, _) = llama("gqa"), prompts(1, length=64)
    held = []
    for threshold in (0.1, 1.0, 3.0):
        with mp.compress(model, "dms", "100%", threshold=threshold, score="h2o", window=4, page_slots=4) as cache:
            with torch.no_grad():
                model(ids, cache=cache)
            held.append(cache.stats().kv_bytes)
    assert held[0] > held[1] > held[2]


@pytest.mark.parametrize("chunk", [7, 16])
def test_batches_chunks_and_turns(chunk: int) -> None:
    model, (ids, mask) = llama("gqa"), prompts(3)
    options = {"threshold": 0.9, "score": "h2o", "window": 4}

    def kept(rows: list[int], chunk: int | None) -> tuple[Any, Any]:
        with torch.no_grad(), mp.compress(model, "dms", "90%", between_chunks=False, **options) as cache:
            out = model.generate(
                input_ids=ids[rows],
                attention_mask=mask[rows],
                max_new_tokens=6,
                do_sample=False,
                cache=cache,
                prefill_chunk_size=chunk,
            )
            return out[:, 40:].tolist(), [[cache.positions(layer, s) for layer in (0, 1)] for s in range(len(rows))]

    together = kept([0, 1, 2], None)
    assert kept([0, 1, 2], chunk) == together
    assert kept([1], chunk) == (together[0][1:2], together[1][1:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "tova"}, "has no score per head"),
        ({"score": "h2o/prefill=greedy"}, "leave out prefill=greedy"),
        ({"threshold": "low"}, "must be a number, or auto"),
        ({"threshold": float("inf")}, "must be a finite number"),
        ({"score": "full"}, "keeps everything"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dms(**options)
