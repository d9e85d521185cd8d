"""Many rows of bf16 through a matrix, the norm in front and what comes behind: against float64, and against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from millpond.kernels import native
from millpond.kernels.decoder_ops import TOLERANCE, DecoderOps, GatedActivation, NativeDense, Norm, Projection
from millpond.kernels.linear import has_products, linear
from millpond.kernels.native import library
from millpond.kernels.native.decoder_rows import MANY_ROWS
from tests.helpers.examples import examples
from tests.helpers.kernels.libraries import running

pytestmark = [
    pytest.mark.skipif("v3" not in library.runnable(), reason="the hardware has no vectors of 8 floats"),
    pytest.mark.usefixtures("two_threads"),
]

ACTIVATE: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    GatedActivation.SILU: F.silu,
    GatedActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    GatedActivation.RELU: F.relu,
}


each_library = pytest.mark.parametrize("isa", [name for name in library.runnable() if name.startswith(("v3", "v4"))])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@each_library
@given(
    m=st.one_of(st.integers(1, 40), st.integers(380, 800)),
    n=st.integers(1, 100),
    blocks=st.integers(1, 5),
    act=st.sampled_from(list(ACTIVATE)),
    halves=st.booleans(),
    biased=st.booleans(),
    added=st.booleans(),
    norm=st.sampled_from(["", "rms", "layer"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60))
def test_against_float64(
    isa: str, m: int, n: int, blocks: int, act: int, halves: bool, biased: bool, added: bool, norm: str, seed: int
) -> None:
    k, rows = 32 * blocks, 2 * n if halves else n
    x, weight = draw(m, k, seed=seed), draw(rows, k, seed=seed + 1)
    bias, residual = draw(rows) if biased else None, draw(m, n, seed=seed + 2) if added else None
    chosen = Norm(draw(k), draw(k, seed=5) if norm == "layer" else None, 1e-5, norm == "layer") if norm else None
    with running(isa):
        found = native.gemm(x, weight, bias, norm=chosen, residual=residual, act=act, halves=halves)
    taken = x if chosen is None else native.norm(x, chosen.weight, chosen.bias, eps=chosen.eps, centred=chosen.centred)
    sums = F.linear(taken.double(), weight.double(), None if bias is None else bias.double())
    opened, closed = sums.split(n, 1) if halves else (sums, torch.ones(()).double())
    expected = ACTIVATE[act](opened) * closed + (0 if residual is None else residual.double())
    size = ((1 + opened.abs()) * closed.abs() + 1).max()
    assert (found.double() - expected).abs().max() <= 2e-2 * size


@each_library
def test_neither_threads_nor_the_other_rows_change_a_bit(isa: str) -> None:
    x, weight, norm = draw(900, 256), draw(150, 256), (draw(256), None, 1e-6, False)
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            with running(isa):
                found.append(native.gemm(x, weight, norm=norm, act=GatedActivation.SILU, halves=True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, found[0]) for other in found)
    with running(isa):
        few = native.gemm(x[7:120], weight, norm=norm, act=GatedActivation.SILU, halves=True)
    assert torch.equal(few, found[0][7:120])


def test_a_linear_layer_of_many_rows() -> None:
    x, weight, bias = draw(MANY_ROWS // 4, 10, 64).transpose(0, 1), draw(30, 64), draw(30)
    found = linear(x, weight, bias)
    assert found.shape == (10, MANY_ROWS // 4, 30)
    if native.gemm_serves(x.reshape(-1, 64), weight):
        assert torch.equal(found.reshape(-1, 30), native.gemm(x.reshape(-1, 64), weight, bias))
    torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    learning = linear(x, weight.requires_grad_(), bias)
    learning.float().sum().backward()  # torch's own: a gradient comes back
    assert weight.grad is not None


def test_who_may_use_it() -> None:
    x, weight = draw(MANY_ROWS, 64), draw(10, 64)
    fits = native.gemm_serves(x, weight)
    assert fits is not torch.cpu._is_amx_tile_supported()
    assert native.gemm_serves(x[:-1], weight) is not has_products(x)
    assert not native.gemm_serves(x[:, :48], weight[:, :48])
    assert not native.gemm_serves(x.float(), weight.float())
    assert not native.gemm_serves(x, draw(64, 10).T)


@pytest.mark.parametrize("act", [GatedActivation.SILU, GatedActivation.GELU])
def test_a_layer_is_what_torch_makes_of_it(act: GatedActivation) -> None:
    width, inner = 96, 160
    x, ours, theirs = draw(MANY_ROWS + 5, width), NativeDense(few=False), DecoderOps()
    both, down, bias = draw(2 * inner, width), draw(width, inner), draw(width)
    parts = ((both[:inner], None), (both[inner:], None))
    up = Projection(parts, (both, None), Norm(draw(width), None, 1e-5, centred=False), act)
    out = Projection(((down, bias),), (down, bias))
    for alone in (up, Projection(((both, None),), (both, None), None, act)):
        opened, expected = ours.activated(x, alone), theirs.activated(x, alone)
        assert (opened - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
    for found, expected in zip(ours.apart(x, up), theirs.apart(x, up), strict=True):
        assert (found - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
    rows = draw(MANY_ROWS + 5, inner)
    found, expected = ours.added(rows, out, x), theirs.added(rows, out, x)
    assert (found - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()


@each_library
@pytest.mark.parametrize("act", [None, GatedActivation.SILU, GatedActivation.GELU])
def test_weights_that_lie_apart_give_the_bits_of_those_together(isa: str, act: GatedActivation | None) -> None:
    """A layer that is read from a file has its matrices where they are; one in memory has them one after another."""
    x, ours, weight = draw(MANY_ROWS + 5, 512), NativeDense(few=False), draw(2 * 160, 512)
    norm = Norm(draw(512), None, 1e-6, centred=False)
    parts = tuple((part.clone(), None) for part in weight.split(160))
    apart, together = (Projection(parts, whole, norm, act) for whole in (None, (weight, None)))
    with running(isa):
        if act is not None:
            assert torch.equal(ours.activated(x, apart), ours.activated(x, together))
        for found, expected in zip(ours.apart(x, apart), ours.apart(x, together), strict=True):
            assert torch.equal(found, expected)
