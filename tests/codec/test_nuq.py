"""One-dimensional k-means against all partitions, and the tables made of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.codec.groups import Coder
from millpond.codec.nuq import MAX_POINTS, as_table, key_table, kmeans, q_norm
from millpond.errors import OptionError
from millpond.kernels.packed.layout import Format, Side
from tests.helpers.examples import examples


def inertia(x: Tensor, w: Tensor, centres: Tensor) -> float:
    return float((w * (x[:, None] - centres[None]).square().amin(1)).sum())


def best_by_brute_force(x: Tensor, w: Tensor, k: int) -> float:
    x, order = x.sort()
    w = w[order]
    found = float("inf")
    for cuts in itertools.combinations(range(1, len(x)), k - 1):
        bounds = [0, *cuts, len(x)]
        error = 0.0
        for a, b in itertools.pairwise(bounds):
            mean = (w[a:b] * x[a:b]).sum() / w[a:b].sum()
            error += float((w[a:b] * (x[a:b] - mean).square()).sum())
        found = min(found, error)
    return found


@given(n=st.integers(4, 10), k=st.integers(1, 4), seed=st.integers(0, 200))
@settings(max_examples=examples(60))
def test_it_finds_the_best_partition(n: int, k: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x, w = torch.randn(n, generator=gen).double(), torch.rand(n, generator=gen).double() + 0.01
    assert inertia(x, w, kmeans(x, w, k)) == pytest.approx(best_by_brute_force(x, w, k), rel=1e-9, abs=1e-12)


def test_weights_count_as_copies() -> None:
    x, w = torch.tensor([0.0, 1.0, 5.0, 6.0, 9.0]), torch.tensor([3, 1, 2, 1, 4])
    torch.testing.assert_close(kmeans(x, w, 3), kmeans(x.repeat_interleave(w), None, 3))


def test_many_samples_beat_an_even_grid_and_repeat_exactly() -> None:
    x = torch.randn(5 * MAX_POINTS, generator=torch.Generator().manual_seed(1)).double()
    one = torch.ones_like(x)
    centres = kmeans(x, None, 8)
    assert torch.equal(centres, kmeans(x.flip(0), None, 8))
    assert torch.equal(centres, centres.sort().values)
    assert inertia(x, one, centres) < 0.5 * inertia(x, one, torch.linspace(float(x.min()), float(x.max()), 8).double())
    assert inertia(x, one, centres) / len(x) == pytest.approx(0.0345, rel=0.05)  # Lloyd-Max, 3 bits, N(0, 1)


def test_fewer_points_than_centres() -> None:
    assert kmeans(torch.tensor([1.0, 2.0]), None, 4).tolist() == [1.0, 2.0, 2.0, 2.0]


def test_weights_must_be_weights() -> None:
    with pytest.raises(OptionError, match="weights"):
        kmeans(torch.ones(3), torch.zeros(3), 2)


def test_a_key_table_beats_integers_at_equal_bits() -> None:
    keys = torch.randn(4096, 32, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.2, 8, 32)
    table, scale, zero = key_table(keys, None, 3)
    assert list(table) == sorted(table)
    assert max(map(abs, table)) <= 1
    page = keys[:64][None]
    dense = Coder(Side(Format.NUQ3, by_channel=True, fixed=True, table=table), (scale, zero))
    evenly = Coder(Side(Format.INT3, by_channel=True, fixed=True), (scale * 2 / 7, zero - scale))
    errors = [float((c.decode(c.encode(page)) - page).norm()) for c in (dense, evenly)]
    assert errors[0] < errors[1]


def test_outliers_are_exact_and_of_the_promised_number() -> None:
    keys = torch.randn(4096, 32, generator=torch.Generator().manual_seed(3))
    table, scale, zero = key_table(keys, None, 4)
    page = keys[:64][None].clone()
    page[0, 7, 3] = 40.0
    side = Side(Format.NUQ4, by_channel=True, fixed=True, n_extra=20, table=table)
    parts = Coder(side, (scale, zero)).encode(page)
    read = Coder(side, (scale, zero)).decode(parts)
    assert parts.where is not None
    slot, channel = parts.where[0] // 256, parts.where[0] % 256
    assert len(parts.where[0]) == 20
    assert (7, 3) in set(zip(slot.tolist(), channel.tolist(), strict=True))
    torch.testing.assert_close(read[0, slot, channel], page[0, slot, channel], rtol=1e-3, atol=1e-3)


def test_q_norm_restores_mean_and_deviation() -> None:
    y = torch.randn(20_000, generator=torch.Generator().manual_seed(4)).clamp(-3, 3) / 3
    table = as_table(kmeans(y, None, 4))
    moved, cuts = q_norm(table, y)
    read = torch.tensor(moved)[torch.bucketize(y, torch.tensor(cuts))]
    assert float(read.mean()) == pytest.approx(float(y.mean()), abs=2e-3)
    assert float(read.std()) == pytest.approx(float(y.std()), rel=5e-3)
