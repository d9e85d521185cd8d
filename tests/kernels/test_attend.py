"""Entries that many sequences share are read once: `ops.attend`, and the two phases put together."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import native, ops, reference
from millpond.kernels.args import AttendArgs, EntryRows, PageRegions
from millpond.kernels.eager.softmax import lse_merge
from millpond.kernels.native import library
from tests.helpers.examples import examples
from tests.helpers.kernels.make import Call, Case

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
IMPLS = [reference, ops, pytest.param(native, marks=needs_native)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@st.composite
def runs(draw: st.DrawFn) -> tuple[Call, Tensor, float]:
    """Pages of one run, queries of a few sequences, and a softcap."""
    heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    longest = draw(st.sampled_from([3, 40, 300]))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    call = Case(
        draw(st.lists(st.integers(0, longest), min_size=heads, max_size=heads)),
        1,
        heads,
        group,
        draw(st.sampled_from([1, 16, 40, 64, 128])),
        draw(st.sampled_from([1, 16, 40, 128])),
        draw(st.sampled_from([8, 64])),
        dtype,
        masses=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    ).build()
    gen = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    n_seq = draw(st.sampled_from([1, 2, 7, 33]))
    q = torch.randn(n_seq, heads * group, call.case.key_dim, generator=gen).to(dtype)
    return call, q, draw(st.sampled_from([0.0, 2.0]))


@needs_native
@given(drawn=runs())
@settings(max_examples=examples(60))
def test_native_equals_reference(drawn: tuple[Call, Tensor, float]) -> None:
    call, q, softcap = drawn
    (out, lse), (found, found_lse) = (
        impl.attend(AttendArgs(q, call.regions, 0.3, softcap)) for impl in (reference, native)
    )
    tol = TOLERANCE[q.dtype]
    torch.testing.assert_close(found, out, rtol=tol, atol=tol)
    torch.testing.assert_close(found_lse, lse, rtol=tol, atol=tol)


@pytest.mark.parametrize("impl", IMPLS)
def test_only_members_see_the_entries(impl: ModuleType) -> None:
    call = Case([45, 20], 1, 2, 2).build()
    q = torch.randn(5, 4, 16)
    everybody = impl.attend(AttendArgs(q, call.regions, 0.3))
    out, lse = impl.attend(AttendArgs(q, call.regions, 0.3, members=torch.tensor([1, 4])))
    for s in range(5):
        if s in (1, 4):
            torch.testing.assert_close(out[s], everybody[0][s], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(lse[s], everybody[1][s], rtol=1e-6, atol=1e-6)
        else:
            assert not out[s].any()
            assert bool((lse[s] == -torch.inf).all())


@needs_native
@given(drawn=runs(), seed=st.integers(0, 99))
@settings(max_examples=examples(30))
def test_what_was_found_elsewhere_is_put_together_as_in_the_reference(
    drawn: tuple[Call, Tensor, float], seed: int
) -> None:
    call, q, softcap = drawn
    gen = torch.Generator().manual_seed(seed)
    members = torch.randperm(len(q), generator=gen)[: len(q) // 2 + 1].sort().values
    out = torch.randn(*q.shape[:2], call.pages.value_dim, generator=gen)
    lse = 3 * torch.randn(q.shape[:2], generator=gen)
    lse[0, 0], out[0, 0] = -torch.inf, 0.0
    (expected, total), (found, both) = (
        impl.attend(AttendArgs(q, call.regions, 0.3, softcap, members, (out.clone(), lse.clone())))
        for impl in (reference, native)
    )
    tol = TOLERANCE[q.dtype]
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)
    torch.testing.assert_close(both, total, rtol=tol, atol=tol)
    others = torch.ones(len(q), dtype=torch.bool)
    others[members] = False
    assert torch.equal(found[others], out[others])
    assert torch.equal(both[others], lse[others])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_was_found_may_be_of_the_dtype_of_the_queries(impl: ModuleType, dtype: torch.dtype) -> None:
    call = Case([45, 20], 1, 2, 2, 40, 80, 8, dtype).build()
    q, out, lse = torch.randn(5, 4, 40).to(dtype), torch.randn(5, 4, 80).to(dtype), torch.randn(5, 4)
    members = torch.tensor([0, 1, 4])
    found, both = (
        impl.attend(AttendArgs(q, call.regions, 0.3, 0.0, members, (out.to(wide, copy=True), lse.clone())))
        for wide in (dtype, torch.float32)
    )
    assert found[0].dtype is dtype
    assert torch.equal(found[0], both[0].to(dtype))
    assert torch.equal(found[1], both[1])


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    call = Case([1500, 700, 1200], 1, 3, 2, 64, 64, 8, dtype).build()
    q, threads = torch.randn(33, 6, 64).to(dtype), torch.get_num_threads()
    found = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(native.attend(AttendArgs(q, call.regions, 0.1)))
    finally:
        torch.set_num_threads(threads)
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.mark.parametrize(
    "found",
    [
        (torch.zeros(3, 4, 16).half(), torch.zeros(3, 4)),
        (torch.zeros(3, 4, 15), torch.zeros(3, 4)),
        (torch.zeros(3, 4, 16), torch.zeros(4, 3).T),
    ],
)
def test_what_cannot_be_changed_in_place_is_refused(found: tuple[Tensor, Tensor]) -> None:
    call = Case([5, 5], 1, 2, 2).build()
    with pytest.raises(OptionError, match=r"contiguous float32 of shape \(3, 4"):
        ops.attend(AttendArgs(torch.randn(3, 4, 16), call.regions, 1.0, partial=found))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_two_phases_are_one_attention(impl: ModuleType, softcap: float) -> None:
    """Shared entries and a sequence's own, apart and put together, are what decoding over both finds."""
    n_seq, heads, shared, own = 3, 2, 45, [11, 0, 29]
    lens = [shared + n for n in own for _ in range(heads)]
    whole = Case(lens, n_seq, heads, 4, slots=8, softcap=softcap, same_slots=True).build()
    index = torch.arange(shared, dtype=torch.int32).expand(heads, -1)
    common = (whole.keys[:heads], whole.values[:heads], whole.positions[:heads])
    n = torch.full((heads,), shared, dtype=torch.int32)
    for s in range(n_seq):  # every sequence begins with the first one's entries
        rows = slice(s * heads, (s + 1) * heads)
        reference.write(
            PageRegions(whole.pages, whole.table[rows], torch.zeros_like(n)),
            EntryRows(torch.zeros_like(n), n, index, *common),
        )
    at = 40  # shared pages are whole ones
    common_pages = PageRegions(whole.pages, whole.table[:heads, : at // 8], torch.full_like(n, at))
    first = impl.attend(AttendArgs(whole.q, common_pages, whole.case.key_dim**-0.5, softcap))
    part = whole.clone()
    part.table, part.lens = part.table[:, at // 8 :].contiguous(), part.lens - at
    out, lse, _ = part.run(impl)
    found, both = lse_merge(out, lse, *first)
    expected, total, _ = whole.run(impl)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_shared_adds_nothing(impl: ModuleType) -> None:
    call = Case([0, 0], 1, 2, 2).build()
    out, lse = impl.attend(AttendArgs(torch.randn(3, 4, 16), call.regions, 1.0))
    assert torch.equal(out, torch.zeros(3, 4, 16))
    assert torch.equal(lse, torch.full((3, 4), -torch.inf))
