"""CAKE by hand, and against a plain reference over a model's own attention."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.cake import MeanAndShift, Preference
from millpond.policy.view import View
from tests.helpers.hf.eager import eager_attention
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.keyed import view

cake = METHODS.get("cake")
GROUP, HEADS = 4, 2
WINDOW, KERNEL, BUDGET, GAMMA, SPREAD, SHIFT = 4, 3, 14, 5.0, 0.7, 2.0


def shown(rows: list[list[list[float]]]) -> View:
    """One KV head and its query heads' rows (group, w, N)."""
    values = torch.ones(1, len(rows[0][0]), 1)
    return replace(view(values, values), attention_rows=lambda head: torch.tensor(rows))


def test_the_mean_and_the_variance_over_queries() -> None:
    """Of the second entry: means .3 and .1, variances .01 and 0."""
    rows = [[[0.5, 0.4, 0.1], [0.5, 0.2, 0.3]], [[0.1, 0.1, 0.8], [0.1, 0.1, 0.8]]]
    score = MeanAndShift(1, 1, gamma=10.0).score(shown(rows), 0)[0]
    assert score.tolist() == pytest.approx([0.3, 0.2 + 10 * 0.005, 0.0])
    pooled = MeanAndShift(1, 3, gamma=10.0).score(shown(rows), 0)[0]
    assert pooled.tolist() == pytest.approx([0.55 / 3, 0.55 / 3, 0.0])


def test_a_layer_s_preference() -> None:
    """E = -(.5 log .5 + .25 log .25), each query's; V: (.5, .25) and (.25, .5) have .015625 each."""
    rows = [[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]]
    entropy, variance = 2 * (0.5 * math.log(2) + 0.25 * math.log(4)), 2 * 0.015625
    of = Preference(MeanAndShift(1, 1), spread=2.0, shift=0.5)
    assert of.measure(shown(rows)) == pytest.approx(entropy**0.5 * variance**2)
    assert of.measure(shown([[[1.0]]])) == 0


def test_shares_are_of_what_is_not_the_window_s() -> None:
    of = Preference(MeanAndShift(1, 1))
    assert of.decide((1.0, 3.0)).wanted(14, 4, [99, 99]) == pytest.approx([4 + 5, 4 + 15])
    assert of.decide((0.0, 0.0)).wanted(14, 4, [99, 99]) == pytest.approx([14, 14])


class Reference:
    """Numbers of a layer, entry by entry, from attention (Hq, n, n)."""

    def __init__(self, attention: Tensor) -> None:
        n = attention.shape[-1]
        self.before = range(n - WINDOW)
        entropy = variance = 0.0
        self.scores = []
        for g in range(HEADS):
            means = [0.0] * len(self.before)
            for h in range(g * GROUP, g * GROUP + GROUP):
                for j in self.before:
                    seen = [float(attention[h, i, j]) for i in range(-WINDOW, 0)]
                    entropy -= sum(a * math.log(a) for a in seen if a)
                    variance += pvariance(seen)
                    means[j] += (fmean(seen) + GAMMA * pvariance(seen)) / GROUP
            self.scores.append([sum(means[i] for i in (j - 1, j, j + 1) if i in self.before) for j in self.before])
        self.preference = entropy ** (1 / SPREAD) * variance ** (1 / SHIFT)

    def kept(self, budget: int) -> list[set[int]]:
        """Entries before the window that each head keeps."""
        return [set(sorted(self.before, key=lambda j, own=own: -own[j])[: budget - WINDOW]) for own in self.scores]


def test_against_the_model_s_own_attention() -> None:
    model, (ids, _) = deepcopy(llama("gqa")), prompts(1)
    with torch.no_grad():  # attention of one layer shifts more
        model.model.layers[1].self_attn.q_proj.weight *= 8
    n = ids.shape[1]
    plain = [Reference(attention[0]) for attention in eager_attention(model, ids)]
    options = {"window": WINDOW, "kernel": KERNEL, "gamma": GAMMA, "spread": SPREAD, "shift": SHIFT}
    with torch.no_grad(), mp.compress(model, "cake", BUDGET, **options) as cache:
        model(ids, cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
    total = plain[0].preference + plain[1].preference
    wanted = [WINDOW + 2 * (BUDGET - WINDOW) * one.preference / total for one in plain]
    assert abs(wanted[0] - BUDGET) > 2
    for layer, one in enumerate(plain):
        budget = round(wanted[layer])
        assert [set(own) for own in kept[layer]] == [own | set(range(n - WINDOW, n)) for own in one.kept(budget)]


@pytest.mark.parametrize("decode", ["grow", "once", "evict"])
def test_budgets_hold_while_decoding(decode: Any) -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    with torch.no_grad(), mp.compress(model, "cake", BUDGET, window=WINDOW, decode=decode) as cache:
        model(ids, cache=cache)
        for token in (5, 9, 11):
            model(torch.tensor([[token]]), cache=cache)
        held = sum(len(own) for layer in (0, 1) for own in cache.positions(layer))
        assert held == 2 * HEADS * (BUDGET + (0 if decode == "evict" else 3))


def test_an_even_pool_is_refused() -> None:
    with pytest.raises(OptionError, match="kernel=4 must be odd, 1 to 255"):
        cake(kernel=4)
