"""What is kept of all products of entries with other vectors: C++ against the reference, and both by hand."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.kernels import blockwise, native, ops, reference
from millpond.kernels.native import library
from tests.helpers.examples import examples

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
EVERYONE = [reference, blockwise, ops, pytest.param(native, marks=needs_native)]
SEEDS = st.integers(0, 999)


def entries(seed: int, heads: int, n: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Keys (heads, n, dim) with strides, some of them alike."""
    gen = torch.Generator().manual_seed(seed)
    few = torch.randn(6, heads, dim, generator=gen)[torch.randint(0, 6, (n,), generator=gen)]
    return (torch.randn(n, heads, dim, generator=gen) + seed % 3 * few).to(dtype).transpose(0, 1)


@pytest.mark.parametrize("impl", EVERYONE)
def test_absolute_sums_by_hand(impl: ModuleType) -> None:
    x = torch.tensor([[[1.0, 2.0], [0.0, -1.0]]])
    y = torch.tensor([[[1.0, 0.0], [1.0, -1.0]], [[0.0, 3.0], [-1.0, -1.0]]])  # two sets of one head
    assert impl.absolute_sums(x, y).tolist() == [[1 + 1 + 6 + 3, 0 + 1 + 3 + 1]]


@needs_native
@given(
    seed=SEEDS,
    heads=st.integers(1, 3),
    sets=st.integers(1, 3),
    n=st.sampled_from([1, 47, 200]),
    others=st.sampled_from([1, 130, 300]),
    dim=st.sampled_from([1, 24, 64, 130]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_absolute_sums(
    isa: str, seed: int, heads: int, sets: int, n: int, others: int, dim: int, dtype: torch.dtype
) -> None:
    x, y = entries(seed, heads, n, dim, dtype), entries(seed + 1, heads * sets, others, dim, dtype)
    exact = reference.absolute_sums(x.double(), y.double())  # in float32 the reference is as far off
    terms = reference.absolute_sums(x.double().abs(), y.double().abs())  # products that cancel round as large ones do
    error, half = (native.absolute_sums(x, y) - exact).abs(), torch.finfo(torch.float32).eps / 2
    assert bool((error <= 1e-5 * exact + (half * terms).clamp(min=1e-5)).all())


@pytest.mark.parametrize("impl", EVERYONE)
def test_newest_alike_by_hand(impl: ModuleType) -> None:
    """Of four copies and one of its own the last three count; the fifth copy is not there."""
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [1.0, 0.0]]])
    lens = torch.tensor([4], dtype=torch.int32)
    at, cosines = impl.newest_alike(keys, lens, 0.5, 2)
    assert at.tolist() == [[[3, 1], [3, 0], [-1, -1], [1, 0], [-1, -1]]]
    assert cosines.tolist() == [[[1, 1], [1, 1], [0, 0], [1, 1], [0, 0]]]


@needs_native
@given(
    seed=SEEDS,
    heads=st.integers(1, 3),
    n=st.sampled_from([1, 47, 129, 300, 700]),
    dim=st.sampled_from([3, 16, 64]),
    most=st.integers(1, 4),
    threshold=st.sampled_from([-0.2, 0.3, 0.5, 0.95]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.integers(1, 3),
)
@settings(max_examples=examples(80))
def test_newest_alike(
    seed: int, heads: int, n: int, dim: int, most: int, threshold: float, dtype: torch.dtype, threads: int
) -> None:
    keys = entries(seed, heads, n, dim, dtype)
    lens = torch.tensor([max(1, n - 40 * h) for h in range(heads)], dtype=torch.int32)
    expected, wanted = reference.newest_alike(keys, lens, threshold, most)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        at, cosines = native.newest_alike(keys, lens, threshold, most)
    finally:
        torch.set_num_threads(before)
    same = (at == expected).all(-1)
    assert (~same).sum() <= 2  # a cosine within rounding of the threshold may count or not
    torch.testing.assert_close(cosines[same], wanted[same], rtol=1e-5, atol=1e-5)
