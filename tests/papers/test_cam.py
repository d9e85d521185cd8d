"""CaM by hand: which values are added to which, the expectation, draws, the three variants, masses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millpond.kernels.merge.reference import chain
from millpond.methods import METHODS
from millpond.policy.merging import NewestStay, SpreadOverNext
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention
from tests.helpers.papers.keyed import run, sets, text, view

cam = METHODS.get("cam")
VALUES = torch.tensor([[[1.0], [10.0], [20.0], [100.0], [200.0], [300.0]]], dtype=torch.float64)
ATTENTION = [4.0, 0.5, 3.0, 1.0, 2.0, 3.0]


def values(budget: int = 4, attention: list[float] = ATTENTION, sinks: int = 1, **settings: object) -> dict[int, float]:
    """By position: values of the sinks and the newest after 6 tokens."""
    weigh = AccumulatedAttention()
    into = SpreadOverNext(weigh, sinks=sinks, **settings)  # type: ignore[arg-type]
    policy = Policy(score=NewestStay(weigh), protect=Protect(sinks=sinks), merge=into, mass_bias=into.bias)
    keys = torch.randn(1, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plan = policy.plan(view(keys, VALUES, signal=torch.tensor([attention])), budget)
    assert plan.merged is not None
    assert torch.equal(plan.merged.keys, keys)
    columns = plan.keep[0].nonzero()[:, 0].tolist()
    assert torch.equal(plan.merged.scores, torch.tensor([attention]))
    return {j: float(plan.merged.values[0, j]) for j in columns}


def test_values_by_hand() -> None:
    """1 leaves; behind it are 2 to 5 with a mean of 2.25: p = 2/9. Then 2, with a mean of 2 behind it: p = 1."""
    first = 2 / 9 * 10 / 4
    given = first + (20 + first) / 3
    assert values() == pytest.approx({0: 1, 3: 100 + given, 4: 200 + given, 5: 300 + given}, abs=1e-12)


def test_few_targets_and_fewer_than_asked() -> None:
    """1 gives to 2 and 3, whose mean is 2: p = 1/4; 2 then gives all it has to 3 and 4. 16 find four, and four stay."""
    assert values(targets=2) == pytest.approx({0: 1, 3: 100 + 1.25 + 21.25 / 2, 4: 200 + 21.25 / 2, 5: 300}, abs=1e-12)
    assert values(targets=2)[5] == 300
    assert values(targets=16) == values(targets=0) == values(targets=4)


def test_columns_that_pass_on_against_loops() -> None:
    """`flow`: 150 columns in several blocks, each gives to its own number of columns behind it."""
    make = torch.Generator().manual_seed(1)
    x = torch.randn(2, 150, 3, generator=make, dtype=torch.float64)
    share = torch.rand(2, 150, generator=make, dtype=torch.float64) / 4 * (torch.rand(2, 150, generator=make) < 0.7)
    reach = torch.randint(0, 9, (2, 150), generator=make)
    expected = x.clone()
    for h in range(2):
        for i in range(150):
            for j in range(i + 1, min(150, i + 1 + int(reach[h, i]))):
                expected[h, j] += share[h, i] * expected[h, i]
    assert torch.allclose(chain(x, share, reach), expected, atol=1e-12)
    assert not torch.allclose(expected, x, atol=0.1)


def test_expectation_is_exact_for_what_is_summed() -> None:
    """sum_j a_j V_j keeps a_i V_i while p < 1, with the attention that p was made of."""
    attention = [4.0, 0.5, 1.25, 1.0, 2.0, 3.0]
    for targets in (1, 2, 3):
        limit = 1.0 if targets == 1 else 1.5
        given = [a if a < limit else limit / 2 for a in attention[:3]] + attention[3:]
        before = sum(a * float(x) for a, x in zip(given, VALUES[0, :, 0], strict=True))
        after = sum(given[j] * x for j, x in values(attention=given, targets=targets, sinks=1).items())
        assert after == pytest.approx(before, rel=1e-12)


def test_no_attention_gives_nothing_and_much_gives_all() -> None:
    assert values(attention=[1.0, 0, 0, 1, 1, 1]) == {0: 1, 3: 100, 4: 200, 5: 300}
    assert values(attention=[1.0, 9, 2, 1, 1, 1])[3] == pytest.approx(110)
    assert values(attention=[0.0] * 6) == {0: 1, 3: 100, 4: 200, 5: 300}


@pytest.mark.parametrize(("over", "p"), [("targets", [2 / 9, 1.0]), ("recent", [0.25, 1.0]), ("max", [0.125, 0.75])])
def test_what_attention_is_divided_by(over: str, p: list[float]) -> None:
    """The mean of what is behind, that of the kept 1, 2, 3, or the largest of all kept, the sink's 4."""
    first = p[0] * 10 / 4
    assert values(over=over)[3] - 100 == pytest.approx(first + p[1] * (20 + first) / 3)


def test_draws_are_right_on_average_and_the_same_again() -> None:
    """20,000 heads draw for p = 1/3: 10 / 4 is added in a third of them."""
    n = 20_000
    weigh = AccumulatedAttention()
    into = SpreadOverNext(weigh, draw=True, sinks=1)
    policy = Policy(score=NewestStay(weigh), protect=Protect(sinks=1), merge=into, seed=3)
    signal = torch.tensor([[4.0, 0.5, 0.0, 1.0, 2.0, 3.0]]).expand(n, -1)
    shown = view(torch.ones(n, 6, 2), VALUES.expand(n, -1, -1).float(), signal=signal)
    added = []
    for _ in range(2):
        merged = policy.plan(shown, 4).merged
        assert merged is not None
        added.append(merged.values[:, 3, 0] - 100)
    assert torch.equal(*added)
    assert sorted(set(added[0].tolist())) == pytest.approx([0, 10 / 4], abs=1e-4)
    assert abs(float((added[0] > 1).float().mean()) - 1 / 3) < 0.02
    other = replace(policy, seed=4).plan(shown, 4).merged
    assert other is not None
    assert not torch.equal(other.values[:, 3, 0] - 100, added[0])


def test_masses_go_along() -> None:
    """With the bias 3 has 1/18 of a mass of 1, and a third of the 19/18 that 2 has then; its value is their mean."""
    mass, value = 1 + 1 / 18 + 19 / 18 / 3, 100 + 10 / 18 + (20 + 10 / 18) / 3
    assert values(bias=True)[3] == pytest.approx(value / mass)


def test_while_decoding_against_loops() -> None:
    """Sinks 1, budget 6, three targets, one step at a time, with attention worked row by row."""
    q, k, v = text(heads=2, n=20)
    cache = run(cam(targets=3, sinks=1), 6, q, k, v, prompt=5)
    assert sets(cache) == [[0, 15, 16, 17, 18, 19]] * 2
    for h in range(2):
        assert torch.allclose(cache.read(0).values[h], _loops(q[h], k[h], v[h]), atol=1e-6)


def _loops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    held = {j: (v[j].clone(), 0.0) for j in range(0)}
    for t in range(20):
        held[t] = (v[t].clone(), 0.0)
        row = torch.softmax(torch.stack([q[t] @ k[j] for j in held]), 0).tolist()
        held = {j: (x, a + w) for (j, (x, a)), w in zip(held.items(), row, strict=True)}
        if t >= 5 and len(held) > 6:
            i = sorted(held)[1]
            value, attention = held.pop(i)
            behind = sorted(held)[1:4]
            p = min(1.0, attention / (sum(held[j][1] for j in behind) / 3))
            for j in behind:
                held[j] = (held[j][0] + p * value / 3, held[j][1])
    return torch.stack([held[j][0] for j in sorted(held)])


@pytest.mark.parametrize(
    "options",
    [
        {"targets": 32, "attention": "last", "over": "recent"},
        {"targets": 0, "attention": "mean", "over": "max"},
        {"prefill": "greedy"},
        {"draw": True, "seed": 5},
    ],
)
def test_variants_keep_what_cam_keeps(options: dict[str, object]) -> None:
    q, k, v = text(heads=2, n=30)
    found = [run(cam(sinks=2, **o), 8, q, k, v, prompt=20) for o in ({}, options)]
    assert sets(found[0]) == sets(found[1]) == [[0, 1, *range(24, 30)]] * 2
    assert not torch.equal(found[0].read(0).values, found[1].read(0).values)
