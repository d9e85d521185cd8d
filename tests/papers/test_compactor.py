"""Compactor: leverage by hand and against its definition, the sketch, the blend with attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.compactor import LeverageAndAttention, leverage_scores
from tests.helpers.papers.keyed import best, run, sets, text, view

compactor = METHODS.get("compactor")


def plain(x: Tensor) -> list[float]:
    """x_j^T (X^T X)^-1 x_j with centred rows x (n, D)."""
    x = x - x.mean(0)
    inverse = torch.linalg.pinv(x.T @ x)
    return [float(row @ inverse @ row) for row in x]


def standard(value: list[float]) -> list[float]:
    mean = sum(value) / len(value)
    deviation = (sum((a - mean) ** 2 for a in value) / (len(value) - 1)) ** 0.5
    return [(a - mean) / deviation for a in value]


def everything(k: Tensor) -> Tensor:
    return torch.ones(k.shape[:2], dtype=torch.bool)


def test_leverage_by_hand() -> None:
    """Centred: two at +-1 along x, two at +-3 along y. All four are worth a half, whatever their length."""
    keys = torch.tensor([[[3.0, 2.0], [1.0, 2.0], [2.0, 5.0], [2.0, -1.0]]])
    assert leverage_scores(keys, everything(keys), 0, 0)[0].tolist() == pytest.approx([0.5] * 4, abs=1e-5)
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [5.0, 0.0]]])  # one outlier among copies
    assert leverage_scores(keys, everything(keys), 0, 0)[0].tolist() == pytest.approx([1 / 12] * 3 + [0.75], abs=1e-4)


def test_leverage_against_its_definition() -> None:
    _, k, _ = text(n=20)
    found = leverage_scores(k, everything(k), 48, 0)
    for h in range(2):
        assert found[h].tolist() == pytest.approx(plain(k[h]), abs=1e-4)
        assert float(found[h].sum()) == pytest.approx(6, abs=1e-3)  # the rank
    some = everything(k)
    some[0, ::3] = False
    left = leverage_scores(k, some, 48, 0)
    assert left[0][some[0]].tolist() == pytest.approx(plain(k[0][some[0]]), abs=1e-4)
    assert not left[0][~some[0]].any()


def test_a_sketch_is_the_leverage_of_projected_keys() -> None:
    _, k, _ = text(n=20)
    make = torch.Generator().manual_seed(7)
    matrix = torch.randn(6, 4, generator=make, dtype=torch.float64)
    assert leverage_scores(k, everything(k), 4, 7)[1].tolist() == pytest.approx(plain(k[1] @ matrix), abs=1e-4)


def test_a_sketch_finds_the_outlier() -> None:
    make = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 200, 64, generator=make) * torch.linspace(2, 0.01, 64)
    keys[0, 123] += 8
    for seed in range(5):
        assert int(leverage_scores(keys, everything(keys), 16, seed)[0].argmax()) == 123


@pytest.mark.parametrize("keys", [torch.zeros(1, 5, 3), torch.ones(1, 5, 3), torch.randn(1, 2, 30)])
def test_keys_without_an_inverse_give_finite_scores(keys: Tensor) -> None:
    assert leverage_scores(keys, everything(keys), 0, 0).isfinite().all()


def test_blend_by_hand() -> None:
    """Both parts from their definitions, over all heads, without the protected entries."""
    q, k, v = text(n=24)
    policy = compactor(sinks=2, recent=3, blend=0.5)
    probability = torch.softmax((q @ k.transpose(1, 2)).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf), 2)
    free = range(2, 21)
    leverage, attention = [], []
    for h in range(2):
        leverage += plain(k[h, 2:21])
        received = [float(probability[h, :, j].sum()) / (24 - j) * float(v[h, j].norm()) for j in free]
        padded = [0.0, *received, 0.0]
        attention += [sum(padded[i : i + 3]) / 3 for i in range(len(received))]
    value = [0.5 * a + b for a, b in zip(standard(leverage), standard(attention), strict=True)]
    for h, held in enumerate(sets(run(policy, 11, q, k, v))):
        mine = [0.0, 0.0, *value[19 * h : 19 * h + 19], 0.0, 0.0, 0.0]
        assert held == best(mine, 11, {0, 1, 21, 22, 23})


@pytest.mark.parametrize("budget", [2, 6, 11, 12])
def test_by_itself_leverage_weighs_as_much_as_leaves(budget: int) -> None:
    _, k, v = text(n=12)
    seen = replace(view(k, v, signal=torch.rand(2, 12)), budget=budget)
    assert torch.equal(
        LeverageAndAttention().score(seen, 0), LeverageAndAttention(blend=1 - budget / 12).score(seen, 0)
    )


def test_the_weight_is_of_the_whole_text() -> None:
    """With half of the text gone, a budget of what is left still weighs leverage by half."""
    _, k, v = text(n=12)
    late = view(k, v, signal=torch.rand(2, 12))
    late = replace(late, budget=12, seen=24)
    assert torch.equal(LeverageAndAttention().score(late, 0), LeverageAndAttention(blend=0.5).score(late, 0))


def test_without_leverage_attention_alone_decides() -> None:
    _, k, v = text(n=12)
    signal = torch.rand(2, 12)
    score = LeverageAndAttention(blend=0.0)
    assert torch.equal(
        score.score(view(k, v, signal=signal), 0), score.score(view(k + torch.rand(6), v, signal=signal), 0)
    )


def test_one_seed_one_set() -> None:
    q, k, v = text(dim=12, n=60)
    found = [sets(run(compactor(sketch=3, seed=seed), 20, q, k, v)) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_options_out_of_range() -> None:
    with pytest.raises(OptionError, match=r"blend=-0.1 must be 0 to 1,000,000"):
        compactor(blend=-0.1)
    with pytest.raises(OptionError, match="blend='much' must be a number, or auto"):
        compactor(blend="much")
    with pytest.raises(OptionError, match="sketch=-1 must be 0 to 4,096"):
        compactor(sketch=-1)
