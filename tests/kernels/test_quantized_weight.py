"""Matrices in 4 and 8 bits: held to dequantizing and multiplying in double."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import native
from millpond.kernels.linear import FEW_ROWS, linear
from millpond.kernels.quantized_weight import GROUP, QuantizedWeight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["auto", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MILLPOND_KERNELS", request.param)
    return str(request.param)


@pytest.mark.covering
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (70, 96), (130, 576), (5, 1056)])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.usefixtures("kernels")
def test_a_product_is_that_of_the_numbers(bits: int, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    packed = QuantizedWeight.quantize(draw(*shape, dtype=dtype), bits)
    x, bias = draw(rows, shape[1], dtype=dtype, seed=1), draw(shape[0], dtype=dtype, seed=2)
    exact = x.double() @ packed.widen(torch.float32).double().T + bias.double()
    size = x.double().abs() @ packed.widen(torch.float32).double().abs().T + 1
    found = linear(x, packed, bias)
    assert found.dtype is dtype
    rounding = torch.finfo(dtype).eps if rows <= FEW_ROWS else 2 * torch.finfo(dtype).eps
    assert float(((found.double() - exact).abs() / size).max()) <= max(rounding, 3e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 96, 224, 256, 288, 576])
def test_rows_of_16_bits_lose_less_than_their_rounding(bits: int, dtype: torch.dtype, width: int) -> None:
    packed, x = QuantizedWeight.quantize(draw(37, width, dtype=dtype), bits), draw(7, width, dtype=dtype, seed=1)
    x[:, 3], x[2, :GROUP] = 40 * x[:, 3], 0
    numbers = packed.widen(torch.float32).double()
    exact, groups = x.double() @ numbers.T, x.double().view(7, -1, GROUP).abs().amax(-1)
    most = (groups[:, None, :] * numbers.abs().view(1, 37, -1, GROUP).sum(-1)).sum(-1)  # of the largest of each group
    error = (linear(x, packed).double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps / 2 * exact.abs() + 2**-15 * most + 1e-6).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_seen(bits: int, dtype: torch.dtype, bad: float) -> None:
    packed, x = QuantizedWeight.quantize(draw(5, 96), bits), draw(3, 96, dtype=dtype)
    x[1, 40] = bad
    found = linear(x, QuantizedWeight(packed.codes, packed.scales, dtype))
    assert not found[1].isfinite().any()
    assert bool(found[[0, 2]].isfinite().all())


@pytest.mark.skipif(not native.is_available(), reason="of native kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [0, 1])
def test_matrices_of_4_and_of_8_bits_meet_rows_together(dtype: torch.dtype, gate: int) -> None:
    weights = [draw(70, 160, dtype=dtype, seed=seed) for seed in (0, 1)]
    parts = [(QuantizedWeight.quantize(weight, bits), None) for weight, bits in zip(weights, (4, 8), strict=True)]
    x, norm = draw(5, 160, dtype=dtype, seed=3), 1 + 0.1 * draw(160, dtype=dtype, seed=4)
    together = native.Linears(parts, norm=norm, eps=1e-5, gate=gate)(x)
    alone = [native.Linears([part], norm=norm, eps=1e-5)(x)[0] for part in parts]
    if gate:
        alone = [native.gate(torch.cat(alone, 1), gate)]
    assert len(together) == len(alone)
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_bits_of_the_row_alone(bits: int, dtype: torch.dtype, threads: int) -> None:
    packed, x = QuantizedWeight.quantize(draw(300, 96, dtype=dtype), bits), draw(FEW_ROWS, 96, dtype=dtype, seed=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = linear(x, packed)
        alone = torch.cat([linear(row, packed) for row in x.split(1)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, alone)


@pytest.mark.parametrize(("bits", "most"), [(4, 0.5 / 15), (8, 0.5 / 127)])
def test_codes_are_the_nearest(bits: int, most: float) -> None:
    weight = draw(64, 128)
    grouped = weight.view(64, -1, GROUP)
    spread = grouped.amax(-1) - grouped.amin(-1) if bits == 4 else grouped.abs().amax(-1)
    error = (QuantizedWeight.quantize(weight, bits).widen() - weight).view(64, -1, GROUP).abs().amax(-1)
    assert float((error / spread).max()) < most * 1.05  # and what float16 scales add


@pytest.mark.parametrize("bits", [4, 8])
def test_native_numbers_are_the_references(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = QuantizedWeight.quantize(draw(33, 160), bits)
    found = [packed.widen(dtype) for dtype in DTYPES]
    monkeypatch.setattr("millpond.kernels.quantized_weight.load_native", lambda: None)
    for dtype, numbers in zip(DTYPES, found, strict=True):
        torch.testing.assert_close(numbers, packed.widen(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_a_group_of_equal_numbers_is_exact() -> None:
    weight = torch.tensor([-1.5, 0.0, 0.375, 7.0])[:, None].expand(4, 64).contiguous()
    assert torch.equal(QuantizedWeight.quantize(weight, 4).widen(), weight)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(50, 64)
    whole = QuantizedWeight.quantize(weight, 4)
    monkeypatch.setattr("millpond.kernels.quantized_weight.BLOCK", 64 * 7)
    parts = QuantizedWeight.quantize(weight, 4)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)


def test_bytes_rows_and_embeddings() -> None:
    packed = QuantizedWeight.quantize(draw(40, 64), 4)
    assert packed.nbytes == 40 * 2 * (16 + 4)
    assert packed.shape == (40, 64)
    ids = torch.tensor([3, 39, 3])
    assert torch.equal(packed.take(ids), packed.widen()[ids])
    assert torch.equal(packed.rows(5, 9).widen(), packed.widen()[5:9])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (draw(4, 48), "multiple of 32"),
        (draw(32), "multiple of 32"),
        (torch.full((2, 32), float("nan")), "not finite"),
        (torch.full((2, 32), 7e4), "beyond float16"),
    ],
)
def test_what_cannot_be_quantized_is_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        QuantizedWeight.quantize(weight, 4)
