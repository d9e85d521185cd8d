"""VaSE: widths of values by hand, draws by attention, and its rounds against a model's own attention and values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.vase import WideValuesAndDraws
from millpond.policy.scores.attention import AccumulatedAttention
from tests.helpers.hf.eager import eager_attention_and_values
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.keyed import view
from tests.papers.test_random_attention import draw

vase = METHODS.get("vase")
GROUP, DIM = 4, 8


def test_a_constant_vector_is_not_large() -> None:
    """Values (0, 0), (-3, 3), (5, 5) have widths 0, 6, 0, and lengths 0, 4.24, 7.07."""
    values = torch.tensor([[[0.0, 0.0], [-3.0, 3.0], [5.0, 5.0]]])
    look = replace(view(values, values, signal=torch.full((1, 3), 0.2)), budget=2)
    score = WideValuesAndDraws(AccumulatedAttention(), large=0.5, sinks=0).score(look, 0)
    assert (score[0] > 60).tolist() == [False, True, False]


def test_what_is_not_large_is_drawn_by_its_attention() -> None:
    """Weights 3 to 1 for one place besides the large one: three heads of four draw the first."""
    n = 4000
    values = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.5, 0.0]]).expand(n, -1, -1)
    look = view(values, values, signal=torch.tensor([0.0, 0.3, 0.1]).expand(n, -1))
    policy = replace(vase(sinks=0), score=WideValuesAndDraws(AccumulatedAttention(), 0.5, 0))
    policy = replace(policy, protect=replace(policy.protect, recent=0))
    kept = policy.plan(look, 2).keep
    assert bool(kept[:, 0].all()), "the widest stays, though nothing attends to it"
    assert abs(float(kept[:, 1].float().mean()) - 0.75) < 0.03


@pytest.mark.parametrize("protects", [False, True])
def test_against_the_model_s_own_attention_and_values(protects: bool) -> None:
    """A prompt beyond the budget, and one inside of it that later rounds protect or not; worked entry by entry."""
    model, (ids, _) = llama("gqa"), prompts(1)
    n, window, budget, large, seed = ids.shape[1], 4, 16, 0.5, 5
    settings: dict[str, Any] = {"window": window, "kernel": 3, "sinks": 2, "seed": seed, "large": large, "every": 3}
    attention, captured = eager_attention_and_values(model, ids)
    first = n if not protects else 8
    with torch.no_grad(), mp.compress(model, "vase", budget, prompt=protects, **settings) as cache:
        model(ids[:, :first], cache=cache)
        if protects:
            for token in ids[:, first : budget + 3].split(1, 1):  # the first round
                model(token, cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
    seen = n if not protects else budget + 3
    for layer in (0, 1):
        for g in range(2):
            width = [float(v.max() - v.min()) for v in captured[layer][:seen, g * DIM : (g + 1) * DIM]]
            heads = range(g * GROUP, (g + 1) * GROUP)
            rows = [attention[layer][0, h, i, :seen].tolist() for h in heads for i in range(seen - window, seen)]
            mean = [sum(row[j] for row in rows) / len(rows) for j in range(seen)]
            before = seen - window
            weight = [sum(mean[i] for i in (j - 1, j, j + 1) if 0 <= i < before) / 3 for j in range(before)]
            safe = {0, 1, *range(before, seen), *(range(first) if protects else ())}
            rest = sorted(set(range(seen)) - safe, key=lambda j: -width[j])
            widest = set(rest[: int(large * budget) - 2])
            free = budget - len(safe | widest)
            if free < 0:
                widest, free = set(rest[: budget - len(safe)]), 0
            noise = {j: -math.log(-math.log((draw(layer, g, j, seen) + 0.5) / 2**24)) for j in rest}
            drawn = sorted(set(rest) - widest, key=lambda j: -(math.log(weight[j]) + noise[j]))[:free]
            assert kept[layer][g] == sorted(safe | widest | set(drawn))


def test_its_options_are_checked() -> None:
    with pytest.raises(OptionError, match="kernel=4 must be odd"):
        vase(kernel=4)
    with pytest.raises(OptionError, match=r"large=1\.5"):
        vase(large=1.5)
