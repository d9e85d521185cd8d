"""Prefill in C++ against the reference, and what must never change its results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import blockwise, native, ops, reference
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.native import library
from tests.helpers.examples import examples
from tests.helpers.kernels.args import prefill_args
from tests.helpers.kernels.prompts import Prompt, prompts

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="installed without native kernels"),
    pytest.mark.usefixtures("two_threads"),
]

DIMS = (1, 7, 16, 24, 32, 64, 80, 96, 128, 130, 256)
PROMPTS = prompts([torch.float32, torch.float16, torch.bfloat16], DIMS, DIMS, groups=9)
HOW = st.sampled_from([None, *Reduce])


@given(prompt=PROMPTS, colsum=HOW)
@settings(max_examples=examples(100))
def test_equals_reference(prompt: Prompt, colsum: Reduce | None) -> None:
    prompt.check(prompt.run(reference, colsum), prompt.run(native, colsum))


@given(prompt=PROMPTS, colsum=HOW)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_instruction_set(isa: str, prompt: Prompt, colsum: Reduce | None) -> None:
    prompt.check(prompt.run(reference, colsum), prompt.run(native, colsum))


def long_prompt(
    n: int = 700,
    n_past: int = 300,
    group: int = 4,
    n_kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Prompt:
    gen = torch.Generator().manual_seed(n)
    q = torch.randn(n_kv_heads * group, n, dim, generator=gen).to(dtype)
    k, v = (torch.randn(n_kv_heads, n_past + n, dim, generator=gen).to(dtype) for _ in range(2))
    positions = torch.arange(n_past + n, dtype=torch.int32)
    past = positions[None, :n_past] if n_past else None
    return Prompt(q, k, v, positions[n_past:], past, None, dim**-0.5, 0.0, 0)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "window"), [(1, 0), (4, 0), (4, 300), (70, 0)])
def test_long_prompts(dtype: torch.dtype, group: int, window: int, isa: str) -> None:
    prompt = long_prompt(n=300 if group > 4 else 1100, group=group, n_kv_heads=1, dtype=dtype)
    prompt.window = window
    prompt.check(prompt.run(reference, Reduce.MEAN), prompt.run(native, Reduce.MEAN))


def test_column_sums_are_exact_in_bfloat16() -> None:
    prompt = long_prompt()
    expected, found = (prompt.run(impl, Reduce.SUM)[2] for impl in (reference, native))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_more_heads_than_are_packed_together() -> None:
    prompt = long_prompt(n=40, n_past=6000, n_kv_heads=5, group=1, dim=128, dtype=torch.float32)
    prompt.check(prompt.run(reference, Reduce.SUM), prompt.run(native, Reduce.SUM))


# ------------------------------------------------------------------------------------------- what must change nothing


def assert_identical(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)


@pytest.mark.parametrize("how", list(Reduce))
def test_thread_count_and_repetition_change_no_bit(how: Reduce) -> None:
    prompt = long_prompt()
    torch.set_num_threads(1)
    one = prompt.run(native, how)
    for n_threads in (1, 2, 3, 7, 2):
        torch.set_num_threads(n_threads)
        assert_identical(prompt.run(native, how), one)


def test_asking_for_column_sums_changes_little() -> None:
    prompt = long_prompt()
    with_sums, without = prompt.run(native, Reduce.MEAN), prompt.run(native, None)
    assert without[2] is None
    prompt.check((*with_sums[:2], None), without)


def test_strides() -> None:
    prompt = long_prompt(n=70, n_past=20)
    expected = prompt.run(native, Reduce.SUM)
    for name in ("q", "k", "v"):
        x = getattr(prompt, name)
        wide = torch.full((x.shape[1], x.shape[0], 2, x.shape[2] + 5), float("nan"), dtype=x.dtype)
        rows = wide[:, :, 1, 3:-2].transpose(0, 1)
        rows.copy_(x)
        setattr(prompt, name, rows)
    assert_identical(prompt.run(native, Reduce.SUM), expected)
    prompt.q = prompt.q.transpose(1, 2).contiguous().transpose(1, 2)  # rows that are not contiguous
    assert_identical(prompt.run(native, Reduce.SUM), expected)


def test_shared_past_positions_are_those_of_every_head() -> None:
    prompt = long_prompt(n=70, n_past=200, n_kv_heads=3)
    assert prompt.past_pos is not None
    expected = prompt.run(native, Reduce.SUM)
    prompt.past_pos = prompt.past_pos.expand(3, -1).contiguous()
    assert_identical(prompt.run(native, Reduce.SUM), expected)


def test_what_nobody_sees_may_hold_anything() -> None:
    prompt = long_prompt(n=70, n_past=200)
    assert prompt.past_pos is not None
    prompt.past_pos = prompt.past_pos.masked_fill(prompt.past_pos % 3 == 1, -1)
    expected = prompt.run(native, Reduce.SUM)
    for x in (prompt.k, prompt.v):
        x[:, :200][:, prompt.past_pos[0] < 0] = float("nan")
    found = prompt.run(native, Reduce.SUM)
    assert_identical(found, expected)
    assert found[2] is not None
    assert (found[2][:, :200][:, prompt.past_pos[0] < 0] == 0).all()


def test_nan_is_not_hidden() -> None:
    prompt = long_prompt(n=100, n_past=0, dtype=torch.float32)
    prompt.q[3, 60, 5] = float("nan")
    out, lse, sums = prompt.run(native, Reduce.MEAN)
    assert sums is not None
    assert out[3, 60].isnan().all()
    assert lse[3, 60].isnan()
    assert sums[0, :61].isnan().all()
    out[3, 60], lse[3, 60], sums[0] = 0.0, 0.0, 0.0
    assert not any(x.isnan().any() for x in (out, lse, sums))


def test_large_logits_keep_the_mass() -> None:
    prompt = long_prompt(dtype=torch.float32)
    prompt.scale *= 300.0
    _, _, sums = prompt.run(native, Reduce.SUM)
    assert sums is not None
    torch.testing.assert_close(sums.sum(1), torch.full((2,), 700.0 * 4), rtol=1e-4, atol=0)


def test_negative_scale() -> None:
    prompt = long_prompt(n=70, n_past=200, dtype=torch.float32)
    prompt.scale = -0.5
    prompt.check(prompt.run(reference, Reduce.SUM), prompt.run(native, Reduce.SUM))


def test_no_new_tokens() -> None:
    prompt = long_prompt(n=1, n_past=9)
    prompt.q, prompt.q_pos, prompt.k, prompt.v = prompt.q[:, :0], prompt.q_pos[:0], prompt.k[:, :9], prompt.v[:, :9]
    out, lse, sums = prompt.run(native, Reduce.SUM)
    assert out.shape == (8, 0, 64)
    assert lse.shape == (8, 0)
    assert torch.equal(sums, torch.zeros(2, 9))


def test_wrong_index_dtype_is_refused() -> None:
    prompt = long_prompt(n=9, n_past=0)
    prompt.q_pos = prompt.q_pos.long()
    with pytest.raises(OptionError, match="int32"):
        prompt.run(native, None)


# ------------------------------------------------------------------------------------------- who does the work, torch


@pytest.mark.parametrize("choice", ["auto", "native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_who_does_the_work(choice: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", choice)
    prompt = long_prompt(n=30, n_past=0, dtype=dtype)
    impl = reference if choice == "reference" else blockwise if dtype is torch.float64 else native
    assert_identical(prompt.run(ops, Reduce.SUM), prompt.run(impl, Reduce.SUM))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("colsum", [-1, 0])
def test_opcheck(colsum: int) -> None:
    prompt = long_prompt(n=9, n_past=4)
    arguments = (prompt.q, prompt.k, prompt.v, prompt.q_pos, prompt.past_pos, None, None, 0, 0.2, 0.0, colsum, 0.9)
    torch.library.opcheck(torch.ops.millpond.prefill.default, arguments)


@pytest.mark.filterwarnings("ignore")
def test_compiles_without_graph_breaks() -> None:
    prompt = long_prompt(n=20, n_past=4)

    def step(q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return ops.prefill(
            prefill_args(
                q * 2, prompt.k, prompt.v, prompt.q_pos, prompt.past_pos, scale=0.2, colsum=Reduce.MEAN, decay=0.9
            )
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_identical(compiled(prompt.q), step(prompt.q))
