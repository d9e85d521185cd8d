"""What is kept after the prompt by methods that can evict at each step, grow until the next turn ends, or stop."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import millpond as mp
from tests.helpers.matrix.hidden import equals_a_mask
from tests.helpers.matrix.models import llama, prompts

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"sinks": 1},
    "random": {"sinks": 1, "recent": 2},
    "streaming": {"sinks": 2, "positions": "absolute"},
    "h2o": {"sinks": 1, "recent": 2, "average": True},
    "tova": {"pin_newest": True},
    "snapkv": {"window": 4, "kernel": 3},
    "knorm": {},
    "keydiff": {},
    "expected_attention": {},
    "lagkv": {"lag": 4, "sinks": 2},
    "compactor": {"sinks": 2, "recent": 2},
}
BUDGET, LENGTH, DECODED, TURN = 14, 40, 5, 6
Kept = list[list[int]]


def feed(cache: Any, begin: int, end: int, length: int, rows: list[int]) -> list[list[Kept]]:
    """Read columns begin..end-1 of a left-padded batch: in one pass, or one by one. Positions [row][layer][head]."""
    model, (ids, mask) = llama("gqa"), prompts(2, length)
    step = 1 if end - begin == DECODED else end - begin
    for at in range(begin, end, step):
        places = (mask[rows].cumsum(1) - 1).clamp(min=0)[:, at : at + step]
        inputs = {"attention_mask": mask[rows, : at + step], "position_ids": places}
        model(ids[rows, at : at + step], cache=cache, **inputs)
    return [[cache.positions(layer, row) for layer in (0, 1)] for row in range(len(rows))]


def stages(method: str, decode: str, rows: list[int]) -> list[list[list[Kept]]]:
    """What is kept after a prompt, after some steps, and after another turn."""
    ends = [0, LENGTH, LENGTH + DECODED, LENGTH + DECODED + TURN]
    with torch.no_grad(), mp.compress(llama("gqa"), method, BUDGET, decode=decode, **OPTIONS[method]) as cache:
        found = [feed(cache, a, b, ends[-1], rows) for a, b in pairwise(ends)]
        cache.check_integrity()
    return found


@pytest.mark.parametrize("method", OPTIONS)
def test_grow_and_once(method: str) -> None:
    """Both keep the same of the prompt and all that is decoded; the next turn ends with a plan, or stays whole."""
    grow, once, evict = (stages(method, decode, [0, 1]) for decode in ("grow", "once", "evict"))
    assert grow[0] == once[0] == evict[0]
    assert grow[1] == once[1]
    for row in (0, 1):
        seen = LENGTH - 7 * row
        for layer in (0, 1):
            for head in (0, 1):
                prompt, decoded, turn = (stage[row][layer][head] for stage in once)
                assert len(prompt) == BUDGET == len(grow[2][row][layer][head]) == len(evict[1][row][layer][head])
                assert decoded == [*prompt, *range(seen, seen + DECODED)]
                assert turn == [*decoded, *range(seen + DECODED, seen + DECODED + TURN)]


@pytest.mark.covering
@pytest.mark.parametrize("method", ["h2o", "tova", "streaming"])
@pytest.mark.parametrize("decode", ["grow", "once"])
def test_a_batch_goes_as_its_rows_alone(method: str, decode: str) -> None:
    together = stages(method, decode, [0, 1])
    for row in (0, 1):
        assert [stage[row] for stage in together] == [stage[0] for stage in stages(method, decode, [row])]


@pytest.mark.parametrize("method", ["window", "random", "streaming", "h2o", "tova"])
def test_drop_equals_mask(method: str) -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    with torch.no_grad(), mp.compress(model, method, BUDGET, page_slots=4, decode="once", **OPTIONS[method]) as cache:
        equals_a_mask(model, cache, ids, mask, 8)


def test_a_prompt_that_fits_is_not_yet_the_one() -> None:
    """Nothing left at the first turn, so the second is the one that is compressed, and the third stays whole."""
    model, (ids, _) = llama("gqa"), prompts(1)
    with torch.no_grad(), mp.compress(model, "tova", BUDGET, decode="once") as cache:
        held = []
        for begin, end in ((0, 10), (10, 30), (30, 40)):
            model(ids[:, begin:end], cache=cache)
            held.append(len(cache.positions(0)[0]))
    assert held == [10, BUDGET, BUDGET + 10]
