"""Codes and numbers equal to those of other libraries, where the formats coincide. None of them is needed.

Install without their dependencies, so that torch stays: pip install --no-deps torchao hqq termcolor
optimum-quanto ninja
(quanto compiles an extension when it is first used: minutes).
"""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest
import torch
from torch import Tensor

from millpond.codec.groups import Coder, integers

GROUP = 32


def oracle(name: str) -> ModuleType:
    """A module of another library, or a test that is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = f"{name.split('.')[0]} is not installed, or not with this torch"
        try:
            return pytest.importorskip(name, reason=reason, exc_type=ImportError)
        except Exception as error:  # what a library does at import is its own
            pytest.skip(f"{reason}: {error}")


def exact_ranges(bits: int, seed: int = 0) -> Tensor:
    """Numbers (1, 64, 64) whose groups along the channels have ranges that float16 holds exactly."""
    g = torch.Generator().manual_seed(seed)
    most = (1 << bits) - 1
    step = 2.0 ** torch.randint(-5, 2, (64, 64 // GROUP, 1), generator=g)
    low = step * torch.randint(-20, 5, step.shape, generator=g)
    x = torch.rand(64, 64 // GROUP, GROUP, generator=g)
    x[..., 0], x[..., 1] = 0.0, 1.0
    return (low + step * most * x).view(1, 64, 64)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_hqq_groups_along_the_channels(bits: int) -> None:
    hqq = oracle("hqq.core.quantize")
    x = exact_ranges(bits)
    packed, meta = hqq.Quantizer.quantize(
        x.view(-1, GROUP),
        nbits=bits,
        group_size=GROUP,
        axis=1,
        optimize=False,
        round_zero=False,
        device="cpu",
        compute_dtype=torch.float32,
    )
    theirs = hqq.Quantizer.dequantize(packed, meta).view(1, 64, 64).float()
    coder = Coder(integers(bits, GROUP))
    torch.testing.assert_close(coder.decode(coder.encode(x)), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_torchao_symmetric_codes(bits: int) -> None:
    ao = oracle("torchao.quantization.quant_primitives")
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(1))
    most = (1 << (bits - 1)) - 1
    block = (1, 1, GROUP)
    scale, zero = ao.choose_qparams_affine(
        x, ao.MappingType.SYMMETRIC, block, torch.int8, -most, most, scale_dtype=torch.float16
    )
    codes = ao.quantize_affine(x, block, scale.float(), zero, torch.int8, -most, most)
    found = Coder(integers(bits, GROUP, symmetric=True)).encode(x)
    assert found.scales is not None
    assert torch.equal(found.scales.flatten(), scale.flatten())
    assert torch.equal(found.codes - (most + 1), codes.long())


@pytest.mark.parametrize("bits", [2, 4])
def test_quanto_groups_along_the_channels(bits: int) -> None:
    quanto = oracle("optimum.quanto")
    x = exact_ranges(bits, seed=2)
    kind = quanto.qint2 if bits == 2 else quanto.qint4
    rows = x.view(-1, GROUP)
    scale, shift = quanto.MaxOptimizer()(rows, kind, 0, GROUP)
    theirs = quanto.quantize_weight(rows, kind, 0, scale, shift, group_size=GROUP, optimized=False).dequantize()
    coder = Coder(integers(bits, GROUP))
    torch.testing.assert_close(coder.decode(coder.encode(x)), theirs.view(1, 64, 64), rtol=1e-4, atol=1e-4)
