"""DefensiveKV by hand, and against a plain reference over a model's own attention, values and output projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.defensivekv import WorstRisk, pooled_rows
from millpond.policy.view import View
from tests.helpers.hf.eager import eager_attention_and_values
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.keyed import view

defensivekv = METHODS.get("defensivekv")
GROUP, HEADS, DIM = 4, 2, 8
WINDOW, KERNEL, BUDGET = 4, 3, 12


def shown(rows: list[list[float]], values: list[float], **changes: Any) -> View:
    """One head and query head; the last entry of each row is the window's, one query wide."""
    v = torch.tensor(values)[None, :, None]
    look = replace(view(v, v), outputs=lambda: torch.ones(1, 1, 1), **changes)
    return replace(look, attention_rows=lambda head: torch.tensor(rows)[None])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0.6, 0.3, 0.1, 0.0], [0.1, 0.3, 0.6, 0.0]], [0.6, 0.5, 0.6]),
        ([[0.9, 0.05, 0.05, 0.0], [0.9, 0.1, 0.0, 0.0]], [0.9, 0.35, 0.35]),
    ],
)
def test_the_worst_of_the_window_and_its_mean_as_the_floor(rows: list[list[float]], expected: list[float]) -> None:
    score = WorstRisk(window=1, kernel=1, mass=0.0, numbers=0)
    found = score.score(shown(rows, [2.0, 2.0, 2.0, 7.0], budget=3), 0)[0]
    assert (found[:3] * 3).tolist() == pytest.approx(expected)
    heavy = score.score(shown(rows, [1.0, 4.0, 1.0, 7.0], budget=3), 0)[0]
    assert (heavy[:3] * 6).tolist() == pytest.approx([expected[0], 4 * expected[1], expected[2]])


def test_a_pool_keeps_the_sum_of_each_row() -> None:
    """(.6, 0, .3, 0) by three: (.2, .3, .1, .1) of sum .7, brought back to .9; the fourth is not inside."""
    inside = torch.tensor([True, True, True, False])
    pooled = pooled_rows(torch.tensor([[[0.6, 0.0, 0.3, 0.0]]]), inside, 3)[0, 0]
    assert pooled.tolist() == pytest.approx([0.3, 0.45, 0.15, 0.0])


@pytest.mark.parametrize(
    ("mass", "budget", "stage_one"),
    [
        (0.9, 9, {0, 1}),  # .2 of the window, .5 and .2 before it
        (0.7, 9, {0}),  # .2 and .5 are enough
        (0.2, 9, set()),  # the window alone
        (1.0, 9, {0, 1, 2}),
        (1.0, 2, {0}),  # a place besides the window's
        (1.0, 1, set()),  # fewer than the window takes chooses nothing, and not everything
    ],
)
def test_the_first_stage_is_what_carries_the_mass(mass: float, budget: int, stage_one: set[int]) -> None:
    pinned = torch.tensor([[False, False, False, True]])
    look = shown([[0.5, 0.2, 0.1, 0.2]], [1.0, 1.0, 9.0, 1.0], budget=budget, pinned=pinned)
    found = WorstRisk(window=1, kernel=1, mass=mass, numbers=0).score(look, 0)[0]
    assert set((found >= 1).nonzero()[:, 0].tolist()) == stage_one
    rest = [j for j in range(3) if j not in stage_one]
    assert max(rest, key=lambda j: float(found[j]), default=2) == max(rest, default=2), "then the largest value"


class Reference:
    """Numbers of a layer, entry by entry, from attention (Hq, n, n), values (H, n, D) and maps (Hq, D, hidden)."""

    def __init__(self, attention: Tensor, values: Tensor, maps: Tensor, mass: float) -> None:
        self.n = values.shape[1]
        self.before = range(self.n - WINDOW)
        norms = [[self._norm(values[g], maps, g, j) for j in self.before] for g in range(HEADS)]
        whole = sum(map(sum, norms))
        self.effect, self.first = [], []
        for g in range(HEADS):
            rows = [attention[h, i].tolist() for h in range(g * GROUP, g * GROUP + GROUP) for i in range(-WINDOW, 0)]
            worst = self._worst(rows)
            floor = sum(worst) / len(worst)
            self.effect.append([max(r, floor) * x / whole for r, x in zip(worst, norms[g], strict=True)])
            mean = [sum(row[j] for row in rows) / len(rows) for j in range(self.n)]
            reached, chosen = sum(mean[self.n - WINDOW :]), []
            for j in sorted(self.before, key=lambda j: -mean[j]):
                if reached >= mass or len(chosen) == BUDGET - WINDOW:
                    break
                chosen.append(j)
                reached += mean[j]
            self.first.append(set(chosen))

    def _norm(self, values: Tensor, maps: Tensor, g: int, j: int) -> float:
        heads = range(g * GROUP, g * GROUP + GROUP)
        return sum(float((values[j] @ maps[h]).abs().sum()) for h in heads) / GROUP

    def _worst(self, rows: list[list[float]]) -> list[float]:
        worst = [0.0] * len(self.before)
        for row in rows:
            pooled = [sum(row[i] for i in (j - 1, j, j + 1) if i in self.before) / KERNEL for j in self.before]
            scale = sum(row[j] for j in self.before) / sum(pooled)
            worst = [max(w, p * scale) for w, p in zip(worst, pooled, strict=True)]
        return worst

    def order(self) -> list[tuple[float, int, int]]:
        """(number, head, position) of what competes."""
        return [(self.effect[g][j] + (j in self.first[g]), g, j) for g in range(HEADS) for j in self.before]


@pytest.mark.parametrize("mass", [0.9, 0.45])
@pytest.mark.parametrize("across", [False, True])
def test_against_the_model_s_own_attention_and_values(across: bool, mass: float) -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    n = ids.shape[1]
    attention, captured = eager_attention_and_values(model, ids)
    plain = []
    for layer, block in enumerate(model.model.layers):
        maps = block.self_attn.o_proj.weight.detach().T.reshape(HEADS * GROUP, DIM, -1)
        values = captured[layer].view(n, HEADS, DIM).transpose(0, 1)
        plain.append(Reference(attention[layer][0], values, maps, mass))
    settings = {"window": WINDOW, "kernel": KERNEL, "mass": mass, "across": across}
    with torch.no_grad(), mp.compress(model, "defensivekv", BUDGET, **settings) as cache:
        model(ids, cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
    total = HEADS * (BUDGET - WINDOW)
    chosen = [sorted(one.order(), reverse=True)[:total] for one in plain]
    if across:  # as many as are among the best of both layers, in whole entries per head
        both = sorted([(*entry, layer) for layer in (0, 1) for entry in plain[layer].order()], reverse=True)
        wins = [sum(entry[3] == layer for entry in both[: 2 * total]) for layer in (0, 1)]
        counts = [sum(map(len, kept[layer])) - HEADS * WINDOW for layer in (0, 1)]
        assert sum(counts) == 2 * total
        assert all(abs(count - won) < HEADS for count, won in zip(counts, wins, strict=True))
        chosen = [sorted(one.order(), reverse=True)[:count] for one, count in zip(plain, counts, strict=True)]
    for layer in (0, 1):
        for g in range(HEADS):
            own = [j for _, head, j in chosen[layer] if head == g]
            assert kept[layer][g] == sorted([*own, *range(n - WINDOW, n)])
        assert all(one <= set(kept[layer][g]) for g, one in enumerate(plain[layer].first)), "stage one stays"


def test_across_is_refused_where_entries_leave_earlier() -> None:
    with pytest.raises(OptionError, match=r"defensivekv: across=true .* give across=false"):
        defensivekv(across=True, decode="evict")
    with pytest.raises(OptionError, match="kernel=4 must be odd"):
        defensivekv(kernel=4)
