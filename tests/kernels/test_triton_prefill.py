"""Prefill in Triton against the reference: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE, DTYPES, close, ints, normal, quick, seeds

# isort: split
from millpond.kernels import gpu, reference
from millpond.kernels.decode_rules import Reduce
from tests.helpers.kernels.args import prefill_args


@quick
@given(
    st.sampled_from(DTYPES),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 3)),
    st.sampled_from(((16, 16), (24, 40), (80, 8))),
    st.integers(1, 150),
    st.sampled_from((0, 1, 33, 70)),
    st.sampled_from((None, *Reduce)),
    st.sampled_from((0.0, 3.0)),
    st.sampled_from((0, 1, 50)),
    st.booleans(),
    st.booleans(),
    seeds,
)
@example(torch.float32, 1, 2, (16, 16), 150, 0, Reduce.SUM, 0.0, 50, False, False, 0)
@example(torch.float16, 1, 3, (16, 16), 40, 9, Reduce.MAX, 0.0, 0, False, False, 0)
def test_prefill(
    dtype: torch.dtype,
    n_kv_heads: int,
    group: int,
    dims: tuple[int, int],
    n_rows: int,
    n_past: int,
    colsum: Reduce | None,
    softcap: float,
    window: int,
    has_sink: bool,
    one_row: bool,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    n_heads, n_columns = n_kv_heads * group, n_past + n_rows
    q = normal(g, n_rows, n_heads, dims[0], dtype=dtype).transpose(0, 1)
    k = normal(g, n_columns, n_kv_heads, dims[0], dtype=dtype).transpose(0, 1)
    v = normal(g, n_kv_heads, n_columns, dims[1], dtype=dtype)
    past_pos = ints(torch.randint(-1, 80, (1 if one_row else n_kv_heads, n_past), generator=g)) if n_past else None
    gaps = torch.randint(1, 3, (n_rows,), generator=g)  # positions ascend, not always by one
    sink = normal(g, n_heads) if has_sink else None
    options: dict[str, Any] = {
        "scale": 0.3,
        "softcap": softcap,
        "window": window,
        "sink_logits": sink,
        "colsum": colsum,
        "decay": 0.97 if seed % 2 else 1.0,
    }
    q_pos = ints(80 + gaps.cumsum(0))
    want = reference.prefill(prefill_args(q, k, v, q_pos, past_pos, **options))
    got = gpu.prefill(prefill_args(q, k, v, q_pos, past_pos, **options))
    close(got[0], want[0], dtype)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    if colsum is None:
        assert got[2] is None
    else:
        assert got[2] is not None
        assert want[2] is not None
        torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "group", "softcap", "window", "has_sink", "one_row", "colsum"),
    [
        (torch.float32, 1, 0.0, 0, False, True, Reduce.SUM),
        (torch.float16, 4, 3.0, 0, True, False, Reduce.MAX),
        (torch.bfloat16, 8, 3.0, 50, True, True, Reduce.MEAN),
        (torch.float32, 4, 0.0, 50, False, False, None),
    ],
)
def test_prefill_with_masses(
    dtype: torch.dtype, group: int, softcap: float, window: int, has_sink: bool, one_row: bool, colsum: Reduce | None
) -> None:
    g = torch.Generator().manual_seed(12)
    n_rows, n_past = 45, 39
    q = normal(g, 2 * group, n_rows, 24, dtype=dtype)
    k, v = (normal(g, 2, n_past + n_rows, 24, dtype=dtype) for _ in range(2))
    past_pos = ints(torch.randint(-1, 80, (1 if one_row else 2, n_past), generator=g))
    past_log_masses = (torch.rand(n_past, 1 if one_row else 2, generator=g) * 3).to(DEVICE).T
    past_log_masses = past_log_masses.masked_fill(past_pos[: len(past_log_masses)] < 0, float("nan"))
    options: dict[str, Any] = {
        "scale": 0.3,
        "softcap": softcap,
        "window": window,
        "sink_logits": normal(g, 2 * group) if has_sink else None,
        "colsum": colsum,
        "past_log_masses": past_log_masses,
    }
    q_pos = ints(80 + torch.arange(n_rows))
    want = reference.prefill(prefill_args(q, k, v, q_pos, past_pos, **options))
    got = gpu.prefill(prefill_args(q, k, v, q_pos, past_pos, **options))
    close(got[0], want[0], dtype)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    assert (got[2] is None) == (colsum is None)
    if got[2] is not None:
        torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-5)
