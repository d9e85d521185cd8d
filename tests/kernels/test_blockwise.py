"""Prefill in blocks against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.kernels import blockwise, reference
from millpond.kernels.rules import Reduce


@st.composite
def inputs(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], dict[str, object]]:
    gen = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    n_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n_new, n_past = draw(st.sampled_from([1, 2, 63, 64, 65, 130, 300])), draw(st.sampled_from([0, 0, 1, 50]))
    key_dim, value_dim = draw(st.sampled_from([1, 16, 40])), draw(st.sampled_from([1, 16, 24]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    q = torch.randn(n_kv_heads * group, n_new, key_dim, generator=gen).to(dtype)
    k = torch.randn(n_past + n_new, n_kv_heads, key_dim, generator=gen).to(dtype).transpose(0, 1)  # strided
    v = torch.randn(n_kv_heads, n_past + n_new, value_dim, generator=gen).to(dtype)
    first = 3 * n_past + draw(st.integers(0, 5))
    q_pos = first + torch.arange(n_new, dtype=torch.int32) * draw(st.integers(1, 2))
    past = None
    if n_past:
        rows = draw(st.sampled_from([1, n_kv_heads]))
        past = torch.stack([torch.randperm(max(first, n_past), generator=gen)[:n_past] for _ in range(rows)]).int()
        past = past.masked_fill(torch.rand(past.shape, generator=gen) < 0.2, -1)
    options = {
        "scale": key_dim**-0.5, "softcap": draw(st.sampled_from([0.0, 2.0, 30.0])),
        "window": draw(st.sampled_from([0, 0, 1, 7, 100])),
    }  # fmt: skip
    sink = torch.randn(n_kv_heads * group, generator=gen) if draw(st.booleans()) else None
    return (q, k, v, q_pos, past, sink), options


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-5, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]


@given(drawn=inputs(), colsum=st.sampled_from([None, *Reduce]))
@settings(max_examples=80, deadline=None)
def test_prefill_equals_reference(drawn: tuple[tuple[Tensor, ...], dict[str, object]], colsum: Reduce | None) -> None:
    (q, k, v, q_pos, past, sink), options = drawn
    expected = reference.prefill(q, k, v, q_pos, past, sink_logits=sink, colsum=colsum, **options)
    found = blockwise.prefill(q, k, v, q_pos, past, sink_logits=sink, colsum=colsum, **options)
    tol = tolerance(q.dtype)
    assert found[0].dtype == q.dtype
    for x, y in zip(expected, found, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(y, x, rtol=tol, atol=tol * (len(q_pos) ** 0.5 if y is found[2] else 1))


@given(drawn=inputs(), how=st.sampled_from(Reduce))
@settings(max_examples=40, deadline=None)
def test_column_sums_from_lse(drawn: tuple[tuple[Tensor, ...], dict[str, object]], how: Reduce) -> None:
    (q, k, v, q_pos, past, _), options = drawn
    _, lse, sums = reference.prefill(q, k, v, q_pos, past, colsum=how, **options)
    found = blockwise.colsum_from_lse(q, k, lse, q_pos, past, reduce=how, **options)
    tol = tolerance(q.dtype)
    torch.testing.assert_close(found, sums, rtol=tol, atol=tol * len(q_pos) ** 0.5)


@pytest.mark.parametrize("how", list(Reduce))
def test_column_sums_conserve_mass(how: Reduce) -> None:
    q, k = torch.randn(4, 200, 8), torch.randn(2, 200, 8)
    _, _, sums = blockwise.prefill(q, k, k, torch.arange(200, dtype=torch.int32), scale=0.3, colsum=how)
    assert sums is not None
    total = sums.sum(1)
    if how is not Reduce.MAX:
        expected = 200.0 * (2 if how is Reduce.SUM else 1)
        torch.testing.assert_close(total, torch.full_like(total, expected), rtol=1e-4, atol=0)
    else:
        assert (total >= 200).all()
