"""Linear layers, x @ weight^T + bias: few rows by native kernels, many rows by torch."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from millpond.kernels.backends import NATIVE_DTYPES, load_native
from millpond.kernels.quantized_weight import QuantizedWeight, Weight
from millpond.kernels.thread_count import torch_on_all_threads

#: Numbers of a matrix that are widened at a time: 8 MB of float32.
BLOCK = 2 << 20
#: Numbers of rows of 16-bit products on a CPU are multiples of this.
ROW_STEP = 8


def has_products(x: Tensor) -> bool:
    """Whether torch multiplies this dtype on its device with instructions made for it."""
    return not x.is_cpu or _on_cpu(x.dtype)


def filled_up(x: Tensor) -> Tensor:
    """Return x (N, k) with rows of 0 up to a multiple of ROW_STEP.

    It is x itself where torch keeps no programs for it.
    """
    missing = -len(x) % ROW_STEP
    if not missing or not x.is_cpu or x.dtype.itemsize != 2:
        return x
    padded = x.new_empty(len(x) + missing, x.shape[1])
    padded[: len(x)] = x
    padded[len(x) :] = 0
    return padded


@cache
def _on_cpu(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def multiply_rows(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias in x's dtype, without gradients.

    x (..., k), weight (n, k), bias (n,) or None -> (..., n). A caller that needs gradients uses torch's own function.
    """
    rows = x.reshape(-1, x.shape[-1])
    wide = filled_up(rows if has_products(x) else rows.float())
    with torch_on_all_threads():
        out = _multiply(wide, weight, bias, x.dtype)
    return out[: len(rows)].view(*x.shape[:-1], len(weight))


def _multiply(x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor) and x.dtype is dtype:
        return functional.linear(x, weight, bias)
    out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    step = max(1, BLOCK // weight.shape[1])
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        matrix = (
            weight[part].to(x.dtype) if isinstance(weight, Tensor) else weight.rows(first, first + step).widen(x.dtype)
        )
        out[:, part] = functional.linear(x, matrix, None if bias is None else bias[part].to(x.dtype))
    return out


#: Rows of a `linear` that memory bounds, or little more: at most as many as the kernel holds.
FEW_ROWS = 32


def _may_be_native(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether no gradients or other implementation are requested of these tensors."""
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
    """Return x @ weight^T + bias, at the speed of memory if x has few rows on a CPU.

    Products of up to FEW_ROWS rows, and of many of bf16 where `native.gemm` serves them, are summed in float32 in an
    order that depends neither on the threads nor on the other rows: a row of a batch has the bits of the row alone.
    Torch does the work for other numbers of rows, and where a gradient, autocast, or another dtype, device or layout
    asks for it.

    Args:
        x: (..., k).
        weight: (n, k), rows contiguous, as torch.nn.Linear keeps it, or in codes.
        bias: (n,) or None.

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
    is_wanted = os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
    native = load_native() if is_wanted and x.is_cpu and weight.is_cpu and x.dtype in NATIVE_DTYPES else None
    if native is not None and 0 < x.numel() <= FEW_ROWS * x.shape[-1]:
        few: Tensor = native.linear(x, weight, bias)
        return few
    return multiply_rows(x, weight, bias)
