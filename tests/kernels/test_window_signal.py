"""The attention of a few queries to every entry: C++ against the reference, and what a query may see."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.kernels import blockwise, native, ops, reference
from millpond.kernels.args import AttentionShape, PageRegions
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.native import library
from millpond.kernels.window_args import PagedWindowArgs
from tests.helpers.examples import examples
from tests.helpers.kernels.args import window_args
from tests.helpers.kernels.make import Case
from tests.helpers.kernels.prompts import TOLERANCE

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
HOW = st.sampled_from(list(Reduce))


@st.composite
def lookbacks(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], dict[str, object]]:
    """Entries in any order, some missing, some newer than all queries; heads differ."""
    gen = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    n_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    n_queries, n = draw(st.sampled_from([1, 3, 32, 65])), draw(st.sampled_from([1, 7, 64, 300]))
    dim, dtype = draw(st.sampled_from([1, 16, 40, 64])), draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q = torch.randn(n_kv_heads * group, n_queries, dim, generator=gen).to(dtype)
    k = torch.randn(n, n_kv_heads, dim, generator=gen).to(dtype).transpose(0, 1)  # strided
    q_pos = draw(st.sampled_from([0, 5, 500])) + torch.arange(n_queries, dtype=torch.int32)
    k_pos = torch.stack([torch.randperm(2 * n, generator=gen)[:n] for _ in range(n_kv_heads)]).int()
    k_pos = k_pos.masked_fill(torch.rand(k_pos.shape, generator=gen) < 0.2, -1)
    masses = torch.rand(draw(st.sampled_from([1, n_kv_heads])), n, generator=gen) * 3
    settings = {
        "scale": dim**-0.5,
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "window": draw(st.sampled_from([0, 1, 40])),
        "sink_logits": torch.randn(len(q), generator=gen) if draw(st.booleans()) else None,
        "log_masses": masses if draw(st.booleans()) else None,
    }
    return (q, k, q_pos, k_pos), settings


def check(arguments: tuple[Tensor, ...], settings: dict[str, object], how: Reduce) -> None:
    args = window_args(*arguments, reduce=how, **settings)
    expected, found = (impl.window_signal(args) for impl in (reference, native))
    tol = min(TOLERANCE[arguments[0].dtype], 1e-4)  # products of bfloat16 are exact in float32
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


@needs_native
@given(drawn=lookbacks(), how=HOW)
@settings(max_examples=examples(100))
def test_equals_reference(drawn: tuple[tuple[Tensor, ...], dict[str, object]], how: Reduce) -> None:
    check(*drawn, how)


@needs_native
@given(drawn=lookbacks(), how=HOW)
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_instruction_set(isa: str, drawn: tuple[tuple[Tensor, ...], dict[str, object]], how: Reduce) -> None:
    check(*drawn, how)


@needs_native
@given(drawn=lookbacks(), how=HOW)
@settings(max_examples=examples(60))
def test_with_known_denominators(drawn: tuple[tuple[Tensor, ...], dict[str, object]], how: Reduce) -> None:
    """A window then hides entries and leaves the others their share."""
    arguments, options = drawn
    q = arguments[0]
    lse = torch.randn(q.shape[:2], generator=torch.Generator().manual_seed(3)) + 2
    check(arguments, {**options, "sink_logits": None, "lse": lse}, how)


@pytest.mark.parametrize("impl", [reference, blockwise, ops, pytest.param(native, marks=needs_native)])
def test_near_queries_give_shares_of_all_they_see(impl: ModuleType) -> None:
    q, k = torch.zeros(2, 3, 16), torch.zeros(1, 3, 16)
    at = torch.arange(3, dtype=torch.int32)
    lse = (at + 1.0).log().expand(2, -1)  # each query sees itself and what is older, all alike
    near = impl.window_signal(window_args(q, k, at, at[None], scale=1.0, window=2, lse=lse))
    torch.testing.assert_close(near, torch.tensor([[1 + 1 / 2, 1 / 2 + 1 / 3, 1 / 3]]))


@pytest.mark.parametrize("impl", [reference, blockwise, ops, pytest.param(native, marks=needs_native)])
def test_what_queries_see(impl: ModuleType) -> None:
    q, k = torch.zeros(2, 2, 16), torch.randn(1, 4, 16)
    q_pos, k_pos = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([[4, 3, -1, 9]], dtype=torch.int32)
    k[:, 2] = float("nan")  # where there is no entry
    signal = impl.window_signal(window_args(q, k, q_pos, k_pos, scale=1.0))
    torch.testing.assert_close(signal, torch.tensor([[0.5, 1.5, 0.0, 0.0]]))
    unseen = impl.window_signal(window_args(q, k, q_pos - 3, k_pos, scale=1.0))
    assert torch.equal(unseen, torch.zeros(1, 4))


@pytest.mark.parametrize("masses", [False, True])
@pytest.mark.parametrize("impl", [reference, blockwise, ops, pytest.param(native, marks=needs_native)])
def test_regions_in_pages(impl: ModuleType, masses: bool) -> None:
    """Each region as it would be alone; slots without an entry get nothing."""
    case = Case([5, 0, 40, 17], n_seq=4, group=3, masses=masses).build()
    gen = torch.Generator().manual_seed(2)
    q, sinks = torch.randn(4, 3, 6, 16, generator=gen), torch.randn(12, generator=gen)
    q_pos, regions = torch.arange(30, 36).int(), PageRegions(case.pages, case.table, case.lens)
    found = impl.window_sums(PagedWindowArgs(q, q_pos, regions, 44, AttentionShape(0.3, 0.0, 20, sinks), Reduce.MAX))
    assert found.shape == (4, 44)
    for r, n in enumerate(case.lens.tolist()):
        own = (t[r : r + 1, :n] for t in (case.keys, case.positions))
        log_masses = case.log_masses[r : r + 1, :n] if case.log_masses is not None else None
        shape = {"scale": 0.3, "window": 20, "sink_logits": sinks[3 * r : 3 * r + 3], "log_masses": log_masses}
        keys, positions = own
        alone = reference.window_signal(window_args(q[r], keys, q_pos, positions, reduce=Reduce.MAX, **shape))
        torch.testing.assert_close(found[r : r + 1, :n], alone, rtol=1e-5, atol=1e-6)
        assert not found[r, n:].any()
