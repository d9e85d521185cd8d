"""Entries that many sequences share are read once: `ops.attend`, and the two phases put together."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.make import Call, Case
from millpond.kernels import native, ops, reference
from millpond.kernels.native import library

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
        draw(st.lists(st.integers(0, longest), min_size=heads, max_size=heads)), 1, heads, group,
        draw(st.sampled_from([1, 16, 40, 64, 128])), draw(st.sampled_from([1, 16, 40, 128])),
        draw(st.sampled_from([8, 64])), dtype, masses=draw(st.booleans()), seed=draw(st.integers(0, 999)),
    ).build()  # fmt: skip
    gen = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    n_seq = draw(st.sampled_from([1, 2, 7, 33]))
    q = torch.randn(n_seq, heads * group, call.case.key_dim, generator=gen).to(dtype)
    return call, q, draw(st.sampled_from([0.0, 2.0]))


@needs_native
@given(drawn=runs())
@settings(max_examples=60, deadline=None)
def test_native_equals_reference(drawn: tuple[Call, Tensor, float]) -> None:
    call, q, softcap = drawn
    (out, lse), (found, found_lse) = (
        impl.attend(q, call.pages, call.table, call.lens, scale=0.3, softcap=softcap) for impl in (reference, native)
    )
    tol = TOLERANCE[q.dtype]
    torch.testing.assert_close(found, out, rtol=tol, atol=tol)
    torch.testing.assert_close(found_lse, lse, rtol=tol, atol=tol)


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
        reference.write(whole.pages, whole.table[rows], torch.zeros_like(n), n, index, *common)
    at = 40  # shared pages are whole ones
    kwargs = {"scale": whole.case.key_dim**-0.5, "softcap": softcap}
    first = impl.attend(whole.q, whole.pages, whole.table[:heads, : at // 8], torch.full_like(n, at), **kwargs)
    part = whole.clone()
    part.table, part.lens = part.table[:, at // 8 :].contiguous(), part.lens - at
    out, lse, _ = part.run(impl)
    found, both = ops.lse_merge(out, lse, *first)
    expected, total, _ = whole.run(impl)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_shared_adds_nothing(impl: ModuleType) -> None:
    call = Case([0, 0], 1, 2, 2).build()
    out, lse = impl.attend(torch.randn(3, 4, 16), call.pages, call.table, call.lens, scale=1.0)
    assert torch.equal(out, torch.zeros(3, 4, 16))
    assert torch.equal(lse, torch.full((3, 4), -torch.inf))
