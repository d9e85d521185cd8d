"""Products of many rows: widened where the CPU has no instructions for 16-bit numbers, else torch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from millpond.kernels import linear as products
from millpond.kernels.linear import FEW_ROWS, linear, multiply_rows
from millpond.kernels.quantized_weight import QuantizedWeight


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def widens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_on_cpu", lambda dtype: dtype is torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [1, 64 * 7, 1 << 20])
@pytest.mark.usefixtures("widens")
def test_widened_products_are_rounded_once(
    dtype: torch.dtype, bias: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "BLOCK", block)
    x, weight = draw(2, 20, 64, dtype=dtype), draw(30, 64, dtype=dtype, seed=1)
    b = draw(30, dtype=dtype, seed=2) if bias else None
    exact = functional.linear(x.double(), weight.double(), None if b is None else b.double())
    found = multiply_rows(x, weight, b)
    assert found.dtype is dtype
    assert found.shape == (2, 20, 30)
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-4)


def test_float32_is_torchs_own() -> None:
    x, weight = draw(40, 64, dtype=torch.float32), draw(30, 64, dtype=torch.float32, seed=1)
    assert torch.equal(multiply_rows(x, weight), functional.linear(x, weight))


@torch.no_grad()
@pytest.mark.usefixtures("widens")
def test_linear_widens_what_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.kernels.native.gemm_serves", lambda *args: False)
    x, weight = draw(FEW_ROWS + 1, 48, dtype=torch.bfloat16), draw(30, 48, dtype=torch.bfloat16, seed=1)
    assert torch.equal(linear(x, weight), multiply_rows(x, weight))
    wide = functional.linear(x.float(), weight.float()).bfloat16()
    assert torch.equal(linear(x, weight), wide)


@pytest.mark.parametrize("n", [1, 7, 8, 33])
def test_16_bit_products_see_few_numbers_of_rows(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_on_cpu", lambda dtype: True)
    seen = []
    own = functional.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(len(x))
        return own(x, weight, bias)

    monkeypatch.setattr(products.functional, "linear", watched)
    x, weight = draw(n, 64, dtype=torch.bfloat16), draw(30, 64, dtype=torch.bfloat16, seed=1)
    found = multiply_rows(x, weight)
    assert seen == [-(-n // 8) * 8]
    torch.testing.assert_close(found, own(x, weight))
    seen.clear()
    codes = QuantizedWeight.quantize(weight, 8)
    torch.testing.assert_close(multiply_rows(x, codes), own(x, codes.widen(torch.bfloat16)))
    assert seen == [-(-n // 8) * 8]
    seen.clear()
    multiply_rows(x.float(), weight.float())
    assert seen == [n]
