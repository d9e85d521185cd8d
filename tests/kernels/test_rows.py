"""What a decoder does to a few rows: the native kernels against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from millpond.kernels import native
from millpond.kernels.decoder_ops import GatedActivation, fits, largest
from millpond.kernels.native import library
from millpond.kernels.native.library import PAGE, use_huge_pages
from tests.helpers.examples import examples

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="installed without native kernels"),
    pytest.mark.usefixtures("two_threads"),
]

#: of the largest number of the outcome, or of what it is made of
ERROR = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = st.sampled_from(list(ERROR))
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 509, 1024]))
ACTIVATE: dict[GatedActivation, Callable[[Tensor], Tensor]] = {
    GatedActivation.SILU: F.silu,
    GatedActivation.GELU: F.gelu,
    GatedActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    GatedActivation.RELU: F.relu,
}


def draws(dtype: torch.dtype, seed: int = 0) -> Callable[..., Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=gen).to(dtype)


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def close(found: Tensor, expected: Tensor, size: Tensor | None = None) -> None:
    size = expected.abs().max() + 0.1 if size is None else size
    assert ((found.double() - expected).abs().max() / size) <= ERROR[found.dtype]


@given(m=st.integers(1, 32), k=WIDTHS, dtype=DTYPES, normed=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=examples(40))
def test_several_matrices_and_a_norm(m: int, k: int, dtype: torch.dtype, normed: bool, seed: int) -> None:
    draw = draws(dtype, seed)
    x, norm = draw(m, k), draw(k) if normed else None
    parts = [(draw(n, k), draw(n) if n % 2 else None) for n in (65, 4, 131, 64)[: 1 + seed % 4]]
    x64 = x.double() if norm is None else norm64(x, norm, 1e-5)
    for found, (weight, bias) in zip(native.Linears(parts, norm=norm, eps=1e-5)(x), parts, strict=True):
        close(found, F.linear(x64, weight.double(), None if bias is None else bias.double()))


@given(m=st.integers(1, 32), n=st.integers(1, 150), k=WIDTHS, dtype=DTYPES, gate=st.sampled_from(list(GatedActivation)))
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gate_on_every_instruction_set(
    isa: str, m: int, n: int, k: int, dtype: torch.dtype, gate: GatedActivation
) -> None:
    draw = draws(dtype)
    x, (a, b), bias = draw(m, k), (draw(n, k), draw(n, k)), draw(n)
    found = native.Linears(((a, bias), (b, None)), gate=gate)(x)
    assert len(found) == 1
    opened = ACTIVATE[gate](F.linear(x.double(), a.double(), bias.double()))
    up = F.linear(x.double(), b.double())
    close(found[0], opened * up, size=((1 + opened.abs()) * up.abs()).max() + 0.1)  # a gate may be nearly closed


@pytest.mark.parametrize("dtype", ERROR)
def test_residual_and_a_row_of_a_batch(dtype: torch.dtype) -> None:
    draw = draws(dtype)
    x, w, residual, norm = draw(2, 5, 96), draw(301, 96), draw(2, 5, 301), draw(96)
    through = native.Linears(((w, None),), norm=norm, eps=1e-6)
    found = through(x, residual)[0]
    assert found.shape == residual.shape
    close(found, norm64(x, norm, 1e-6) @ w.double().T + residual.double())
    alone = through(x[1:, 3:4], residual[1:, 3:4].contiguous())[0]
    assert torch.equal(alone, found[1:, 3:4])


@given(m=st.integers(1, 32), n=st.integers(1, 150), k=WIDTHS, dtype=DTYPES, act=st.sampled_from(list(GatedActivation)))
@settings(max_examples=examples(30))
def test_an_activation_alone(m: int, n: int, k: int, dtype: torch.dtype, act: GatedActivation) -> None:
    draw = draws(dtype)
    x, weight, bias = draw(m, k), draw(n, k), draw(n)
    opened = F.linear(x.double(), weight.double(), bias.double())
    close(native.Linears(((weight, bias),), gate=act)(x)[0], ACTIVATE[act](opened), size=opened.abs().max() + 0.1)


@given(m=st.integers(1, 200), n=WIDTHS, dtype=DTYPES, act=st.sampled_from(list(GatedActivation)))
@settings(max_examples=examples(30))
def test_a_gate_over_many_rows(m: int, n: int, dtype: torch.dtype, act: GatedActivation) -> None:
    both = draws(dtype)(m, 2 * n + 3)[:, 3:]
    opened, up = (part.double() for part in both.split(n, 1))
    close(native.gate(both, act), ACTIVATE[act](opened) * up, size=(opened * up).abs().max() + 0.1)


@given(m=st.integers(1, 200), heads=st.integers(1, 3), n=WIDTHS, dtype=DTYPES, centred=st.booleans())
@settings(max_examples=examples(40))
def test_norms(m: int, heads: int, n: int, dtype: torch.dtype, centred: bool) -> None:
    draw = draws(dtype, n)
    x, weight, bias = draw(m, heads + 1, n)[:, 1:], draw(n), draw(n) if centred else None
    x = x if heads > 1 else x[:, 0]
    found = native.norm(x, weight, bias, eps=1e-5, centred=centred)
    assert found.is_contiguous()
    wide = x.double() - (x.double().mean(-1, keepdim=True) if centred else 0)
    expected = norm64(wide, weight, 1e-5)
    expected = expected if bias is None else expected + bias.double()
    # the mean is rounded to float32: of numbers that nearly agree that is a part of their difference
    mean, length = (x.double() - wide).abs(), (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    rounded = torch.finfo(torch.float32).eps * mean / length * weight.double().abs()
    off = (found.double() - expected).abs() - rounded
    assert (off.max() / (expected.abs().max() + 0.1)) <= ERROR[dtype]


@given(m=st.integers(1, 32), k=WIDTHS, dtype=DTYPES)
@settings(max_examples=examples(20))
def test_a_matrix_behind_a_layer_norm(m: int, k: int, dtype: torch.dtype) -> None:
    draw = draws(dtype, k)
    x, norm, shift, weight = draw(m, k), draw(k), draw(k), draw(37, k)
    found = native.Linears(((weight, None),), norm=norm, norm_bias=shift, eps=1e-5, centred=True)(x)[0]
    wide = x.double() - x.double().mean(-1, keepdim=True)
    close(found, (norm64(wide, norm, 1e-5) + shift.double()) @ weight.double().T)


@given(
    m=st.integers(1, 300),
    heads=st.integers(1, 5),
    half=st.integers(1, 70),
    rest=st.integers(0, 5),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40))
def test_rotary_embedding(m: int, heads: int, half: int, rest: int, dtype: torch.dtype, seed: int) -> None:
    dim = 2 * half + rest  # of which the last ones stay
    q, k = draws(dtype, seed)(m, heads * 3, dim).split([heads * 2, heads], 1)
    angles = torch.rand(m, half).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def turned(x: Tensor) -> Tensor:
        wide, c, s = x.double(), cos.double()[:, None], sin.double()[:, None]
        first = wide[..., : 2 * half]
        first = first * c + torch.cat([-first[..., half:], first[..., :half]], -1) * s
        return torch.cat([first, wide[..., 2 * half :]], -1)

    expected = turned(q), turned(k)
    native.rotate_(q, k, cos, sin)
    close(q, expected[0])
    close(k, expected[1])


def test_who_may_use_them() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    with torch.no_grad():
        assert fits(x, (w, None))
        assert not fits(torch.randn(33, 8), (w,))
        assert not fits(x, (w.double(),))
        assert not fits(x.double(), (w.double(),))
        assert not fits(x, (w.T,))
        with torch.autocast("cpu"):
            assert not fits(x, (w,))
    assert not fits(x, (w,))


def test_huge_pages_change_nothing() -> None:
    memory = torch.arange(3 * PAGE, dtype=torch.uint8)
    before = memory.clone()
    assert 0 <= use_huge_pages([memory[: 2 * PAGE], memory[2 * PAGE :], torch.ones(3)]) <= memory.nbytes
    assert torch.equal(memory, before)
    assert use_huge_pages([memory], seconds=0) == 0


@given(m=st.integers(1, 32), k=st.integers(1, 70), dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_heads_are_the_matrices_and_the_rotation(isa: str, m: int, k: int, dtype: torch.dtype, seed: int) -> None:
    draw, dim = draws(dtype, seed), 8
    x, norm, weights = draw(m, k), draw(k), [draw(heads * dim, k) for heads in (6, 2, 2)]
    through = native.Linears([(weight, None) for weight in weights], norm=norm, eps=1e-5)
    cos, sin = draw(m, 2 * (1 + seed % 4)), draw(m, 2 * (1 + seed % 4))
    q, k_, v = (part.view(m, -1, dim) for part in through(x))
    native.rotate_(q, k_, cos, sin)
    for found, expected in zip(through.heads(x, dim, cos, sin), (q, k_, v), strict=True):
        assert torch.equal(found, expected)


@given(m=st.integers(1, 32), dtype=DTYPES, gated=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_behind_attention_is_its_three_steps(isa: str, m: int, dtype: torch.dtype, gated: bool, seed: int) -> None:
    draw, seen_dim, width, inner = draws(dtype, seed), 24, 40, 70
    seen, x, norm, bias = draw(m, seen_dim), draw(m, width), draw(width), draw(width)
    first, last, matrices = draw(width, seen_dim), draw(width, inner), [draw(inner, width) for _ in range(1 + gated)]
    out, down = native.Linears([(first, None)]), native.Linears([(last, bias)])
    up = native.Linears([(matrix, None) for matrix in matrices], norm=norm, eps=1e-5, gate=int(GatedActivation.SILU))
    middle = out(seen, x)[0]
    assert torch.equal(native.Behind(out, up, down)(seen, x), down(up(middle)[0], middle)[0])


@given(m=st.integers(1, 5), n=st.integers(1, 70), dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_largest_is_the_first_of_its_size(isa: str, m: int, n: int, dtype: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randint(-5, 3, (m, n + 3), generator=gen).to(dtype)[:, 1 : n + 1]
    if seed % 3 == 0:
        x[0, n // 2] = (float("nan"), float("inf"), -float("inf"))[seed // 3 % 3]
    most, at = largest(x)
    for row, best, place in zip(x.tolist(), most.tolist(), at.tolist(), strict=True):
        odd = [i for i, value in enumerate(row) if value != value]
        assert place == (odd[0] if odd else row.index(max(row)))
        assert best != best if odd else best == row[place]
    assert torch.equal(largest(torch.full((1, n), -torch.inf, dtype=dtype))[1], torch.tensor([0]))
