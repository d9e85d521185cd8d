"""Linear layers, x @ weight^T + bias, limited by memory bandwidth alone for few rows, as in decoding."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from millpond.kernels.backends import NATIVE_DTYPES, load_native
from millpond.kernels.many_rows import multiply_rows
from millpond.kernels.quantized_weight import QuantizedWeight, Weight

#: Rows of a `linear` that memory bounds, or little more: at most as many as the kernel holds.
FEW_ROWS = 32


def _may_be_native(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether native kernels may take these tensors: neither gradients nor another implementation are requested."""
    dtype = x.dtype
    return (
        weight.dtype is dtype
        and dtype in NATIVE_DTYPES
        and not (
            torch.is_grad_enabled()
            and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        )
        and x.is_cpu
        and weight.is_cpu
        and type(x) is Tensor
        and type(weight) in _PLAIN
        and weight.ndim == 2
        and weight.stride(1) == 1
        and x.ndim > 0
        and x.shape[-1] == weight.shape[1] > 0
        and x.numel() > 0
        and (bias is None or _is_bias(bias, weight))
        and not torch.is_autocast_enabled("cpu")
        and os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
    )


_PLAIN = (torch.nn.Parameter, Tensor)


def _is_bias(bias: Tensor, weight: Tensor) -> bool:
    return (
        bias.dtype is weight.dtype
        and bias.is_cpu
        and type(bias) in _PLAIN
        and bias.shape == weight.shape[:1]
        and bias.is_contiguous()
    )


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias, at the speed of memory where x has few rows on a CPU.

    Products of up to FEW_ROWS rows, and of many of bf16 where `native.gemm` serves them, are summed in float32 in an
    order that depends neither on the threads nor on the other rows: a row of a batch has the bits of the row alone.
    Torch does the work for other numbers of rows, and where a gradient, autocast, or another dtype, device or layout
    asks for it.

    Args:
        x: (..., k). weight: (n, k), rows contiguous, as torch.nn.Linear keeps it, or in codes. bias: (n,) or None.

    Returns:
        (..., n) in x's dtype.
    """
    if isinstance(weight, QuantizedWeight):
        return _linear_of_codes(x, weight, bias)
    native = load_native() if _may_be_native(x, weight, bias) else None
    if native is not None and x.numel() <= FEW_ROWS * x.shape[-1]:
        few: Tensor = native.linear(x, weight, bias)
        return few
    if native is not None and not torch.compiler.is_compiling():
        rows = x.reshape(-1, x.shape[-1])
        if native.gemm_serves(rows, weight):
            many: Tensor = native.gemm(rows, weight, bias)
            return many.view(*x.shape[:-1], -1)
        return multiply_rows(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def _linear_of_codes(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    wanted = os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
    native = load_native() if wanted and x.is_cpu and weight.is_cpu and x.dtype in NATIVE_DTYPES else None
    if native is not None and 0 < x.numel() <= FEW_ROWS * x.shape[-1]:
        few: Tensor = native.linear(x, weight, bias)
        return few
    return multiply_rows(x, weight, bias)
