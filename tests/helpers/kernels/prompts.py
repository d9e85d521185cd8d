"""Random prompts for the tests of prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from hypothesis import strategies as st
from torch import Tensor

from millpond.kernels.decode_rules import Reduce
from tests.helpers.kernels.args import prefill_args

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Prompt:
    """The arguments of `prefill`. Past entries lie in any order, some are missing, heads may differ."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_pos: Tensor
    past_pos: Tensor | None
    sink_logits: Tensor | None
    scale: float
    softcap: float
    window: int
    past_log_masses: Tensor | None = None
    decay: float = 1.0

    def run(self, impl: ModuleType, colsum: Reduce | None) -> tuple[Tensor, Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor, Tensor | None] = impl.prefill(
            prefill_args(
                self.q,
                self.k,
                self.v,
                self.q_pos,
                self.past_pos,
                scale=self.scale,
                softcap=self.softcap,
                window=self.window,
                sink_logits=self.sink_logits,
                colsum=colsum,
                decay=self.decay,
                past_log_masses=self.past_log_masses,
            )
        )
        return result

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.q.dtype]

    def check(
        self, expected: tuple[Tensor, Tensor, Tensor | None], found: tuple[Tensor, Tensor, Tensor | None]
    ) -> None:
        """Compare results; errors of column sums grow like a random walk over the queries."""
        tol = self.tolerance
        assert found[0].dtype == self.q.dtype
        for x, y, walk in zip(expected, found, (1.0, 1.0, len(self.q_pos) ** 0.5), strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                torch.testing.assert_close(y, x, rtol=tol, atol=tol * walk)


@st.composite
def prompts(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype],
    key_dims: Sequence[int] = (1, 16, 40),
    value_dims: Sequence[int] = (1, 16, 24),
    groups: int = 4,
    masses: bool = False,
) -> Prompt:
    gen = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    n_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, groups))
    n_new = draw(st.sampled_from([1, 2, 15, 63, 64, 65, 130, 300]))
    n_past = draw(st.sampled_from([0, 0, 1, 50, 200]))
    key_dim, value_dim = draw(st.sampled_from(key_dims)), draw(st.sampled_from(value_dims))
    dtype = draw(st.sampled_from(dtypes))
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
    sink = torch.randn(n_kv_heads * group, generator=gen) if draw(st.booleans()) else None
    log_masses = None
    if masses and n_past:  # a mass of 1 to 20
        log_masses = torch.rand(draw(st.sampled_from([1, n_kv_heads])), n_past, generator=gen) * 3
    return Prompt(
        q,
        k,
        v,
        q_pos,
        past,
        sink,
        key_dim**-0.5,
        draw(st.sampled_from([0.0, 2.0, 30.0])),
        draw(st.sampled_from([0, 0, 1, 7, 100])),
        log_masses,
        draw(st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.2])),
    )
