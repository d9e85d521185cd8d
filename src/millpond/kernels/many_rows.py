"""Products of many rows through torch, in float32 where the CPU multiplies 16-bit numbers slowly.

Without AVX-512 (or its bf16 in 256-bit vectors) torch multiplies bf16 and f16 in a loop of its own, several times as
slow as float32. There the matrix is widened in blocks, multiplied and the sums rounded once. A quantized matrix is
widened so everywhere.

For 16-bit numbers torch keeps a program of about 250 KB for each number of rows and shape of matrix that it has seen,
up to a thousand of them. Rows are filled up to a multiple of ROW_STEP, so that it sees few.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from millpond.kernels.quantized_weight import Weight
from millpond.kernels.thread_count import torch_on_all_threads

#: Numbers of a matrix that are widened at a time: 8 MB of float32.
BLOCK = 2 << 20
#: Numbers of rows of 16-bit products on a CPU are multiples of this.
ROW_STEP = 8


def has_products(x: Tensor) -> bool:
    """Whether torch multiplies numbers of this type, where they are, with instructions made for it."""
    return not x.is_cpu or _on_cpu(x.dtype)


def filled_up(x: Tensor) -> Tensor:
    """X (N, k) and rows of 0 behind it up to a multiple of ROW_STEP; itself where torch keeps no programs for it."""
    missing = -len(x) % ROW_STEP
    if not missing or not x.is_cpu or x.dtype.itemsize != 2:
        return x
    found = x.new_empty(len(x) + missing, x.shape[1])
    found[: len(x)] = x
    found[len(x) :] = 0
    return found


@cache
def _on_cpu(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def multiply_rows(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias. x: (..., k). weight: (n, k). bias: (n,) or None. -> (..., n) in x's dtype.

    Without gradients: a caller that needs some uses torch's own function.
    """
    rows = x.reshape(-1, x.shape[-1])
    wide = filled_up(rows if has_products(x) else rows.float())
    with torch_on_all_threads():
        found = _multiply(wide, weight, bias, x.dtype)
    return found[: len(rows)].view(*x.shape[:-1], len(weight))


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
