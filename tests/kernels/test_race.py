"""Draws by an exponential race: their distribution, their independence, and C++ beside torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millpond.engine.sampling.token_choice import race, uniform


def keys_of(n: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(seed))


def in_torch(weights: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLPOND_KERNELS", "torch")
        return race(weights, keys, ids)


def plain(key: int, token: int) -> float:
    """The number of one key and token in Python's whole numbers, by the words of SplitMix64."""
    z, all_bits = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64, 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % all_bits
    z = (z ^ z >> 27) * 0x94D049BB133111EB % all_bits
    return ((z ^ z >> 31) // 4096 + 0.5) / 2**52


def test_the_numbers_are_those_of_splitmix() -> None:
    """SplitMix64 from the state 1234567 gives 6457827717110365317 and 3203168211198807973 first."""
    assert [plain(1234567, i) for i in (0, 1)] == [
        (n // 4096 + 0.5) / 2**52 for n in (6457827717110365317, 3203168211198807973)
    ]
    keys, ids = keys_of(50), torch.tensor([0, 1, 2, 77, 151_935, 2**31])
    found = uniform(keys[:, None], ids)
    assert found.tolist() == [[plain(key, token) for token in ids.tolist()] for key in keys.tolist()]


@pytest.mark.parametrize("implementation", [race, in_torch])
def test_draws_follow_the_weights(implementation: object) -> None:
    """Chi-square over 40,000 draws of 9 tokens, 8 degrees of freedom: mean 8, deviation 4."""
    assert callable(implementation)
    weights = torch.tensor([1.0, 2.0, 0.5, 4.0, 0.01, 1.0, 0.0, 0.3, 3.0, 0.7])
    counts = implementation(weights.expand(40_000, -1), keys_of(40_000)).bincount(minlength=10).double()
    expected = 40_000 * weights.double() / weights.sum()
    assert counts[6] == 0
    off = (counts - expected).square() / expected
    assert 0.5 < float(off[expected > 0].sum()) < 30


def test_numbers_of_neighbours_are_unrelated() -> None:
    """Of tokens behind each other, and of keys that differ by one."""
    for numbers in (uniform(torch.tensor(5), torch.arange(8000)), uniform(torch.arange(8000), torch.tensor(5))):
        off = numbers - 0.5
        assert abs(float(off.mean())) < 4 * (1 / 12 / 8000) ** 0.5
        assert abs(float((off[1:] * off[:-1]).mean() * 12)) < 4 / 8000**0.5


@given(
    rows=st.integers(1, 5),
    columns=st.sampled_from([1, 2, 7, 255, 256, 257, 1000]),
    seed=st.integers(0, 10**6),
    named=st.booleans(),
)
def test_cpp_draws_what_torch_draws(rows: int, columns: int, seed: int, named: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    weights = (4 * torch.randn(rows, columns + 3, generator=g)).softmax(-1)[:, 2 : columns + 2]
    weights = weights.where(torch.rand(rows, columns, generator=g) < 0.6, 0)
    weights[:, columns // 2] += 1e-6
    ids = torch.stack([torch.randperm(150_000, generator=g)[:columns] for _ in range(rows)]) if named else None
    keys = keys_of(rows, seed)
    assert torch.equal(race(weights, keys, ids), in_torch(weights, keys, ids))


def test_the_order_of_columns_and_what_else_is_there_change_nothing() -> None:
    weights = torch.rand(200, 300, generator=torch.Generator().manual_seed(0))
    keys = keys_of(200)
    drawn = race(weights, keys)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(order[race(weights[:, order], keys, order.expand(200, -1).contiguous())], drawn)
    kept = weights.where(torch.arange(300) >= 40, 0)
    assert torch.equal(race(kept, keys)[drawn >= 40], drawn[drawn >= 40])


def test_near_distributions_mostly_draw_alike() -> None:
    """At least (1 - t) / (1 + t) of the keys, t half of the sum of |p - q|; one cumulative draw agrees on fewer."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, 1000, generator=g)
    p, q = logits.softmax(-1), (logits + 0.5 * torch.randn(2000, 1000, generator=g)).softmax(-1)
    apart = (p - q).abs().sum(-1) / 2
    keys = keys_of(2000)
    alike = float((race(p, keys) == race(q, keys)).double().mean())
    assert alike > float(((1 - apart) / (1 + apart)).mean()) - 0.03
    u = torch.rand(2000, 1, generator=g)
    cumulative = (torch.searchsorted(p.cumsum(-1), u) == torch.searchsorted(q.cumsum(-1), u)).double().mean()
    assert alike > float(cumulative) + 0.2
