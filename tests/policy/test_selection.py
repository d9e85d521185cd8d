"""Selection: the best stay, ties go to the newest, and a plan's totals are exact for any score."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import (
    AccumulatedAttention,
    LastAttention,
    RandomPriority,
    Recency,
    WindowAttention,
)
from millpond.policy.selection import keep_best, rank_by_value
from millpond.policy.view import View
from tests.helpers.examples import examples


def test_ties_go_to_the_newest() -> None:
    value = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    valid = torch.ones(1, 4, dtype=torch.bool)
    assert rank_by_value(value, valid, ~valid).tolist() == [[3, 2, 1, 0]]


def test_pinned_come_first_and_the_absent_last() -> None:
    value = torch.tensor([[5.0, -1.0, float("-inf"), 9.0]])
    valid = torch.tensor([[True, True, True, False]])
    pinned = torch.tensor([[False, True, False, True]])
    assert rank_by_value(value, valid, pinned & valid).tolist() == [[1, 0, 2, 3]]
    assert keep_best(value, valid, pinned & valid, torch.tensor([4])).tolist() == [[True, True, True, False]]


@settings(max_examples=examples(200))
@given(heads=st.integers(1, 3), n=st.integers(1, 40), seed=st.integers(0, 999))
def test_against_a_plain_sort(heads: int, n: int, seed: int) -> None:
    """Few values, so that many tie; zeros of both signs are one."""
    gen = torch.Generator().manual_seed(seed)
    choice = torch.tensor([-float("inf"), -2.0, -0.0, 0.0, 1e-30, 3.0, float("inf")])
    value = choice[torch.randint(0, len(choice), (heads, n), generator=gen)]
    valid, pinned = (torch.rand(heads, n, generator=gen) < p for p in (0.8, 0.2))
    pinned &= valid
    ranks, counts = rank_by_value(value, valid, pinned), torch.randint(0, n + 2, (heads,), generator=gen)
    keep = keep_best(value, valid, pinned, counts)
    for h in range(heads):
        order = sorted(range(n), key=lambda j, h=h: (not valid[h, j], not pinned[h, j], -float(value[h, j]), -j))  # type: ignore[misc]
        there = order[: int(valid[h].sum())]
        pins = sorted((j for j in there if pinned[h, j]), key=lambda j: int(ranks[h, j]))
        ranked = [*pins, *(j for j in there if not pinned[h, j])]
        assert ranks[h, ranked].tolist() == list(range(len(there)))
        assert keep[h].nonzero()[:, 0].tolist() == sorted(ranked[: int(counts[h])])


SCORES = [
    AccumulatedAttention(),
    AccumulatedAttention(True),
    LastAttention(),
    Recency(),
    RandomPriority(),
    WindowAttention(4, 3),
]


@settings(max_examples=examples(100))
@given(
    score=st.sampled_from(SCORES),
    heads=st.integers(1, 4),
    n=st.integers(1, 30),
    budget=st.integers(5, 20),
    sinks=st.integers(0, 2),
    recent=st.integers(0, 3),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_plans(
    score: AccumulatedAttention, heads: int, n: int, budget: int, sinks: int, recent: int, shared: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    signal = torch.rand(heads, n, generator=generator)
    positions = torch.arange(n, dtype=torch.int32).expand(heads, n)
    view = View(positions, signal, seen=n, layer=1)
    policy = Policy(score=score, protect=Protect(sinks, recent), shared=shared, seed=seed)
    plan = policy.plan(view, budget)
    assert plan.keep.sum(1).tolist() == [min(n, budget)] * heads
    assert plan.caps.tolist() == [budget] * heads
    assert plan.keep[:, :sinks].all()
    assert plan.keep[:, n - min(n, recent) :].all()
    assert torch.equal(plan.keep, policy.plan(view, budget).keep)
    if shared:
        assert (plan.keep == plan.keep[0]).all()
