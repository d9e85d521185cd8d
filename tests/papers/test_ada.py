"""Ada-KV: floors, exact totals, the bound of Theorem 3.1."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.policy.head_allocation import Ada, Uniform, lowest_scored
from millpond.policy.selection import keep_best
from tests.helpers.examples import examples
from tests.helpers.papers.fixture import feed, kept, make_layer_cache

A = torch.tensor([[0.7, 0.2, 0.06, 0.04], [0.25, 0.25, 0.25, 0.25]])
ALL = torch.ones(2, 4, dtype=torch.bool)
NONE = torch.zeros(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, [1, 3]), (0.2, [1, 3]), (0.5, [1, 3]), (1.0, [2, 2])])
def test_floor_rule(alpha: float, expected: list[int]) -> None:
    assert Ada(alpha).keep_counts(A, ALL, NONE, 2).tolist() == expected


@pytest.mark.parametrize(
    ("alpha", "budget", "expected"),
    [
        (0.2, 2, [1, 2]),  # won 1 and 3 of 4: .8 and 2.4, rounded; a floor of .4 is none
        (0.5, 2, [2, 2]),  # .5 + 1 and 1.5 + 1, both rounded to the even number
        (0.0, 2, [1, 3]),
        (1.0, 3, [3, 3]),
        (0.2, 4, [4, 4]),  # all that there is
    ],
)
def test_the_official_allocation_blends_and_rounds(alpha: float, budget: int, expected: list[int]) -> None:
    assert Ada(alpha, blend=True).keep_counts(A, ALL, NONE, budget).tolist() == expected


def test_the_official_allocation_never_holds_more_than_the_budget() -> None:
    """Three heads win 1, 1 and 4 of 6: 1.5, 1.5 and 3, which the authors' code rounds to 7 entries."""
    value = torch.tensor([[9.0, 0, 0, 0], [9.0, 0, 0, 0], [8.0, 7, 6, 5]])
    valid = torch.ones(3, 4, dtype=torch.bool)
    assert Ada(0.5, blend=True).keep_counts(value, valid, ~valid, 2).tolist() == [2, 1, 3]


def test_the_official_allocation_shares_out_once() -> None:
    assert METHODS.get("ada")(allocation="official").heads == Ada(0.2, blend=True)
    with pytest.raises(OptionError, match="shares budgets out once"):
        METHODS.get("ada")(score="h2o", allocation="official", every=4)


@settings(max_examples=examples(200))
@given(
    heads=st.integers(1, 6),
    n=st.integers(1, 20),
    budget=st.integers(1, 20),
    pinned=st.integers(0, 3),
    alpha=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_the_official_allocation_by_its_formula(
    heads: int, n: int, budget: int, pinned: int, alpha: float, seed: int
) -> None:
    """Beside the formula counted out by hand: equal where that fits the budget, and never above the budget."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.rand(heads, n, generator=generator)
    pinned = min(pinned, budget, n)
    pin = torch.arange(n).expand(heads, n) < pinned
    valid = torch.ones(heads, n, dtype=torch.bool)
    counts = Ada(alpha, blend=True).keep_counts(value, valid, pin, budget)
    free, total = budget - pinned, min(heads * budget, heads * n)
    assert int(counts.sum()) <= total
    assert (counts >= max(1, pinned)).all()
    assert (counts <= n).all()
    if budget < n and pinned:
        best = value[:, pinned:].flatten().topk(heads * free).indices // (n - pinned)
        blended = [round((1 - alpha) * int((best == h).sum()) + int(alpha * free)) + pinned for h in range(heads)]
        if sum(blended) <= total:
            assert counts.tolist() == blended


@settings(max_examples=examples(200))
@given(
    heads=st.integers(1, 6),
    n=st.integers(1, 20),
    budget=st.integers(1, 20),
    pinned=st.integers(0, 3),
    alpha=st.floats(0, 1),
    seed=st.integers(0, 999),
    ties=st.booleans(),
)
def test_totals_are_exact_and_no_head_is_emptied(
    heads: int, n: int, budget: int, pinned: int, alpha: float, seed: int, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.rand(heads, n, generator=generator).round(decimals=1 if ties else 6)
    valid = torch.arange(n) < torch.randint(1, n + 1, (heads, 1), generator=generator)
    pin = torch.arange(n).expand(heads, n) < min(pinned, budget)
    counts = Ada(alpha).keep_counts(value, valid, pin & valid, budget)
    assert int(counts.sum()) == min(heads * budget, int(valid.sum()))
    floor = max(1, int(alpha * (budget - min(pinned, budget))))
    assert (counts >= valid.sum(1).clamp(max=floor)).all()
    assert (counts <= valid.sum(1)).all()
    keep = keep_best(value, valid, pin & valid, counts)
    assert keep.sum(1).tolist() == counts.tolist()


def test_bound_of_the_output_error() -> None:
    """loss <= 2C(H - sum kept A) always, and Ada's bound is never above the uniform one."""
    generator = torch.Generator().manual_seed(0)
    h, n, d, budget = 4, 24, 8, 6
    for _ in range(100):
        a = torch.softmax(3 * torch.randn(h, n, generator=generator, dtype=torch.float64), 1)
        v = torch.randn(h, n, d, generator=generator, dtype=torch.float64)
        w = torch.randn(h, d, 16, generator=generator, dtype=torch.float64)
        projected = v @ w  # (h, n, 16)
        c = projected.abs().sum(-1).max()
        full = (a[..., None] * projected).sum((0, 1))
        bounds = []
        for allocation in (Ada(0.0), Uniform()):
            valid = torch.ones(h, n, dtype=torch.bool)
            keep = keep_best(a, valid, ~valid, allocation.keep_counts(a, valid, ~valid, budget))
            kept_mass = (a * keep).sum(1)
            renormalised = a * keep / kept_mass[:, None]
            loss = (full - (renormalised[..., None] * projected).sum((0, 1))).abs().sum()
            bounds.append(2 * c * (h - kept_mass.sum()))
            assert loss <= bounds[-1] + 1e-9
        assert bounds[0] <= bounds[1] + 1e-9


@settings(max_examples=examples(100))
@given(
    heads=st.integers(1, 5),
    n=st.integers(2, 24),
    seed=st.integers(0, 9999),
    sharp=st.sampled_from([0.1, 1.0, 4.0]),
    data=st.data(),
)
def test_no_allocation_of_the_same_total_has_a_lower_bound(
    heads: int, n: int, seed: int, sharp: float, data: st.DataObject
) -> None:
    """Any counts, any choice inside the heads: the loss keeps its bound, and the bound is never below Ada's."""
    budget = data.draw(st.integers(1, n))
    generator = torch.Generator().manual_seed(seed)
    a = torch.softmax(sharp * torch.randn(heads, n, generator=generator, dtype=torch.float64), 1)
    projected = torch.randn(heads, n, 7, generator=generator, dtype=torch.float64)  # v_j W_O of each head
    c = projected.abs().sum(-1).max()
    everything = torch.ones(heads, n, dtype=torch.bool)
    counts = Ada(0.0).keep_counts(a, everything, ~everything, budget)
    assert int(counts.sum()) == heads * budget
    best = keep_best(a, everything, ~everything, counts)
    # another plan of the same size: one entry for each head, the others drawn from anywhere
    first = torch.zeros_like(everything).scatter_(1, torch.randint(n, (heads, 1), generator=generator), True)
    rest = (~first).flatten().nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=generator)[: heads * (budget - 1)]]
    other = first.flatten().scatter(0, drawn, True).view_as(first)
    assert int(other.sum()) == heads * budget
    kept_by_ada = (a * best).sum()
    for keep in (best, other):
        mass = (a * keep).sum(1)
        left = a * keep / mass[:, None]
        loss = ((a - left)[..., None] * projected).sum((0, 1)).abs().sum()
        assert loss <= 2 * c * (heads - mass.sum()) + 1e-9
        assert 2 * c * (heads - kept_by_ada) <= 2 * c * (heads - mass.sum()) + 1e-9


def test_the_weakest_of_all_heads() -> None:
    """Ties leave oldest first, heads at their floor lose nothing, and slot order does not matter."""
    value = torch.tensor([[[0.1, 0.5, 0.1, 0.9], [0.2, 0.0, -0.0, 0.3]]])
    positions = torch.tensor([[[7, 3, 4, 9], [5, 8, 2, 6]]], dtype=torch.int32)
    free = torch.tensor([[[True, True, True, False], [True, True, True, True]]])

    def leaving(spare: list[int], n: int) -> list[list[int]]:
        found = lowest_scored(value, positions, free, torch.tensor([spare]), n)[0]
        return [positions[0, h][found[h]].sort().values.tolist() for h in range(2)]

    assert leaving([4, 4], 2) == [[], [2, 8]]  # both zeros, before the two of 0.1
    assert leaving([4, 4], 3) == [[4], [2, 8]]  # of the two of 0.1 the older
    assert leaving([4, 1], 3) == [[4, 7], [2]]
    assert leaving([0, 4], 3) == [[], [2, 5, 8]]
    assert leaving([4, 0], 4) == [[3, 4, 7], []]  # no more to spare


@pytest.mark.parametrize("score", ["snapkv", "h2o"])
def test_heads_differ_and_memory_follows(score: str) -> None:
    torch.manual_seed(0)
    n = 96
    logits = torch.randn(4, n, n, dtype=torch.float64)
    logits[0] *= 6  # a head that looks at few entries
    logits[1] *= 0.01  # a head that looks at all
    cache = make_layer_cache(METHODS.get("ada")(score=score), budget=48, slots=4)
    feed(cache, logits, 0, n)
    lens = cache.stored[0]
    assert lens.sum() == 4 * 48
    assert len(set(lens.tolist())) > 1
    table = cache.table
    assert table is not None
    assert table.pool.n_live == sum(-(-int(x) // 4) for x in lens)
    if score == "h2o":
        feed(cache, logits[:, :, :], n - 1, n)
        assert cache.stored[0].sum() == 4 * 48
    assert all(len(kept(cache, h)) == cache.stored[0][h] for h in range(4))


def test_a_shared_set_has_no_head_budgets() -> None:
    with pytest.raises(OptionError, match="no score per head"):
        METHODS.get("ada")(score="tova")


def test_alpha_out_of_range() -> None:
    with pytest.raises(OptionError, match=r"alpha=1.5 must be 0 to 1"):
        METHODS.get("ada")(alpha=1.5)
