"""LAVa by hand, and against a plain reference over a model's own attention and values."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.lava import LayerEntropy, ValuedAttention
from millpond.policy.view import View
from tests.helpers.hf.eager import eager_attention_and_values
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.keyed import view

lava = METHODS.get("lava")
GROUP, HEADS, DIM = 4, 2, 8
WINDOW, KERNEL, BUDGET, ALPHA = 4, 3, 24, 0.5


def shown(rows: list[list[list[float]]], values: list[list[float]]) -> View:
    """One KV head, its query heads' rows (group, w, N), values (N, channels)."""
    v = torch.tensor(values)[None]
    return replace(view(v, v), attention_rows=lambda head: torch.tensor(rows))


def test_the_largest_head_s_mean_times_the_longest_value() -> None:
    """Means of the heads: (.4, .1, .1) and (.2, .3, .1). The longest value of the head is |-3| + |2| = 5."""
    rows = [[[0.6, 0.1, 0.1, 0.2], [0.2, 0.1, 0.1, 0.6]], [[0.2, 0.5, 0.1, 0.2], [0.2, 0.1, 0.1, 0.6]]]
    look = shown(rows, [[1.0, 1.0], [-3.0, 2.0], [0.0, 1.0], [0.5, 0.5]])
    assert ValuedAttention(1, 1).score(look, 0)[0].tolist() == pytest.approx([2.0, 1.5, 0.5, 0.0])
    assert ValuedAttention(1, 3).score(look, 0)[0].tolist() == pytest.approx([2.0, 2.0, 1.5, 0.0])


def test_the_window_is_in_no_pool() -> None:
    look = shown([[[0.1, 0.1, 0.8]]], [[1.0], [1.0], [1.0]])
    assert ValuedAttention(1, 3).score(look, 0)[0].tolist() == pytest.approx([0.1, 0.1, 0.0])


def test_layers_by_the_entropy_of_their_scores() -> None:
    """Even over four entries: log 4; all on one: 0, which leaves the other layer what there is."""
    entropy = LayerEntropy(ValuedAttention(1, 1))
    even = entropy.measure(shown([[[0.2, 0.2, 0.2, 0.2, 0.2]]], [[3.0]] * 5))
    one = entropy.measure(shown([[[0.9, 0.0, 0.0, 0.0, 0.1]]], [[3.0]] * 5))
    assert (even, one) == (pytest.approx(math.log(4)), pytest.approx(0))
    assert entropy.measure(shown([[[0.0, 1.0]]], [[3.0]] * 2)) == 0
    assert entropy.decide((1.0, 0.5)).wanted(12, 0, [99, 99]) == pytest.approx([16, 8])
    assert entropy.decide((0.0, 0.0)).wanted(12, 0, [99, 99]) == pytest.approx([12, 12])


class Reference:
    """Scores of a layer, entry by entry, from attention (Hq, n, n) and values (H, n, D)."""

    def __init__(self, attention: Tensor, values: Tensor) -> None:
        n = values.shape[1]
        self.before = range(n - WINDOW)
        self.scores = []
        for g in range(HEADS):
            longest = max(sum(abs(float(x)) for x in values[g, j]) for j in range(n))
            best = [0.0] * len(self.before)
            for h in range(g * GROUP, g * GROUP + GROUP):
                mean = [sum(float(attention[h, i, j]) for i in range(-WINDOW, 0)) / WINDOW for j in self.before]
                pooled = [max(mean[i] for i in (j - 1, j, j + 1) if i in self.before) for j in self.before]
                best = [max(b, p) for b, p in zip(best, pooled, strict=True)]
            self.scores.append([b * longest for b in best])

    def entropy(self) -> float:
        whole = sum(map(sum, self.scores))
        return -sum(s / whole * math.log(s / whole) for own in self.scores for s in own if s)

    def kept(self, budget: int) -> list[set[int]]:
        """Entries before the window that each head keeps of `budget` a head, the window's included."""
        free = budget - WINDOW
        ranked = [sorted(self.before, key=lambda j, own=own: (own[j], j), reverse=True) for own in self.scores]
        kept = [set(own[: int(ALPHA * free)]) for own in ranked]
        rest = sorted((self.scores[g][j], j, g) for g in range(HEADS) for j in self.before if j not in kept[g])
        for _, j, g in rest[::-1][: HEADS * free - sum(map(len, kept))]:
            kept[g].add(j)
        return kept


def test_against_the_model_s_own_attention_and_values() -> None:
    model, (ids, _) = deepcopy(llama("gqa")), prompts(1)
    with torch.no_grad():  # one layer looks at few entries
        model.model.layers[1].self_attn.q_proj.weight *= 60
        model.model.layers[0].self_attn.v_proj.weight[:DIM] *= 10  # one head falls to its floor
    n = ids.shape[1]
    attention, captured = eager_attention_and_values(model, ids)
    plain = [
        Reference(attention[layer][0], values.view(n, HEADS, DIM).transpose(0, 1))
        for layer, values in enumerate(captured)
    ]
    with torch.no_grad(), mp.compress(model, "lava", BUDGET, window=WINDOW, kernel=KERNEL, alpha=ALPHA) as cache:
        model(ids, cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
    entropies = [one.entropy() for one in plain]
    budgets = [sum(map(len, own)) / HEADS for own in kept]
    assert sum(budgets) == 2 * BUDGET
    wanted = [2 * BUDGET * entropy / sum(entropies) for entropy in entropies]
    assert abs(wanted[0] - BUDGET) > 0.5
    assert budgets == [round(share) for share in wanted]
    assert len(kept[0][1]) == WINDOW + int(ALPHA * (budgets[0] - WINDOW))
    for layer, one in enumerate(plain):
        chosen = one.kept(int(budgets[layer]))
        assert [set(own) for own in kept[layer]] == [own | set(range(n - WINDOW, n)) for own in chosen]


@pytest.mark.parametrize("decode", ["grow", "once", "evict"])
def test_budgets_hold_while_decoding(decode: Any) -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    with torch.no_grad(), mp.compress(model, "lava", BUDGET, window=WINDOW, decode=decode) as cache:
        model(ids, cache=cache)
        for token in (5, 9, 11):
            model(torch.tensor([[token]]), cache=cache)
        held = sum(len(own) for layer in (0, 1) for own in cache.positions(layer))
        assert held == 2 * HEADS * (BUDGET + (0 if decode == "evict" else 3))


def test_an_even_pool_is_refused() -> None:
    with pytest.raises(OptionError, match="kernel=4 must be odd, 1 to 255"):
        lava(kernel=4)
