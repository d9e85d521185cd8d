# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of a few rows with a matrix: by a Triton kernel where a trial on the device finds it faster than cuBLAS.

Memory bounds such a product: it takes as long as reading the matrix. A program reads 64 rows of it, or a part of each
of them, once for all rows of x; the parts are then summed in a fixed order, so equal rows give equal bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decoder_ops import TOLERANCE
from millpond.kernels.gpu.common import TYPES, check, dot_type, on_its_device, rows_of
from millpond.kernels.linear import multiply_rows
from millpond.kernels.quantized_weight import Weight

_log = logging.getLogger(__name__)

MOST_ROWS = 8  #: rows of x that a program multiplies: what a tensor core takes at least
BLOCK_N = 64  #: rows of the matrix of a program
BLOCK_BYTES = 256  #: bytes of each of them that are read at a time
BLOCKS = 8  #: least number of blocks of a part
PROGRAMS = 1024  #: programs that are enough for any card; the same on all, so that they sum alike
JOIN_BLOCK = 256  #: numbers of a program of `join_parts`

REPETITIONS = 7  #: timed runs of each side of a trial
WAIT_CYCLES = 500_000  #: of the device before each: the host has launched everything by then
MOST_TIME = 0.95  #: share of cuBLAS's time that the kernel may take, so that noise seldom decides


@triton.jit
def finish(y, row, column, ok, bias, residual, residual_s, out, out_s, n, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    """Store sums y where `ok`, with bias and residual, rounded where torch rounds them."""
    if HAS_BIAS:
        y += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)
        if ADDS:
            y = y.to(out.dtype.element_ty).to(tl.float32)
    if ADDS:
        y += tl.load(residual + row * residual_s + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * out_s + column, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def multiply_few(
    x,
    x_s,
    weight,
    weight_s,
    bias,
    residual,
    residual_s,
    out,
    out_s,
    parts,
    rows,
    n,
    k,
    span,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TYPE: tl.constexpr,
    PARTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Write BLOCK_N columns of the product of all rows.

    If PARTED, of their sums over `span` numbers.
    """
    column = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    row = tl.arange(0, ROWS)[None, :]
    part = tl.program_id(1)
    first = part * span
    weights = weight + column.to(tl.int64) * weight_s
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for at in tl.range(first, tl.minimum(first + span, k), BLOCK_K, num_stages=4):
        d = at + tl.arange(0, BLOCK_K)
        w = tl.load(weights + d[None, :], mask=(column < n) & (d < k)[None, :], other=0.0)
        given = tl.load(x + row * x_s + d[:, None], mask=(row < rows) & (d < k)[:, None], other=0.0)
        y = tl.dot(w.to(TYPE), given.to(TYPE), y, input_precision="ieee")
    ok = (row < rows) & (column < n)
    if PARTED:
        tl.store(parts + (part * rows + row) * n + column, y, mask=ok)
    else:
        finish(y, row, column, ok, bias, residual, residual_s, out, out_s, n, HAS_BIAS, ADDS)


@triton.jit
def join_parts(
    parts,
    n_parts,
    bias,
    residual,
    residual_s,
    out,
    out_s,
    rows,
    n,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Write some numbers of a row from the sums of its parts."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)[:, None]
    ok = (part < n_parts) & (column < n)[None, :]
    y = tl.sum(tl.load(parts + (part * rows + row) * n + column[None, :], mask=ok, other=0.0), 0)
    finish(y, row, column, column < n, bias, residual, residual_s, out, out_s, n, HAS_BIAS, ADDS)


# ---------------------------------------------------------------------------------------------- at launch


@on_its_device
def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias + residual, summed in float32, by the kernel.

    Args:
        x: Rows (R, k), R at most MOST_ROWS.
        weight: (n, k) in x's dtype, rows contiguous.
        bias: (n,) in x's dtype, contiguous.
        residual: (R, n) in x's dtype, rows contiguous; the result takes its memory.

    Raises:
        OptionError: as `common.check`.
    """
    check(x.device, x.dtype)
    x, (rows, k), n = rows_of(x), x.shape, len(weight)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if residual is None else residual
    block = BLOCK_BYTES // x.dtype.itemsize
    blocks_n, blocks_k = triton.cdiv(n, BLOCK_N), triton.cdiv(k, block)
    wanted = min(triton.cdiv(PROGRAMS, blocks_n), max(1, blocks_k // BLOCKS))
    span = triton.cdiv(blocks_k, wanted) * block
    n_parts = triton.cdiv(k, span)
    parts = torch.empty(n_parts, rows, n, dtype=torch.float32, device=x.device) if n_parts > 1 else out
    ends = (out if bias is None else bias, out, out.stride(0), out, out.stride(0))  # the residual lies in `out`
    flags = {"HAS_BIAS": bias is not None, "ADDS": residual is not None}
    multiply_few[(blocks_n, n_parts)](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        *ends,
        parts,
        rows,
        n,
        k,
        span,
        ROWS=MOST_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block,
        TYPE=dot_type(x.dtype, weight.dtype),
        PARTED=n_parts > 1,
        **flags,
        num_warps=4,
    )
    if n_parts > 1:
        width = triton.next_power_of_2(n_parts)
        grid = (rows, triton.cdiv(n, JOIN_BLOCK))
        join_parts[grid](parts, n_parts, *ends, rows, n, PARTS=width, BLOCK=JOIN_BLOCK, **flags)
    return out


def by_torch(x: Tensor, weight: Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return what `multiply` does, of any number of rows, by torch."""
    if residual is None:
        return multiply_rows(x, weight, bias)
    if bias is None and isinstance(weight, Tensor):
        return residual.addmm_(x, weight.t())  # torch.addmm would copy the residual first
    return multiply_rows(x, weight, bias).add_(residual)


def product(x: Tensor, weight: Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return `multiply` or `by_torch` of rows x (N, k), whichever is faster on their device."""
    if _fits(weight, x, bias, residual) and _is_faster(x, weight, bias, residual):
        return multiply(x, weight, bias, residual)
    return by_torch(x, weight, bias, residual)


def _fits(weight: Weight, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> TypeGuard[Tensor]:
    return (
        0 < len(x) <= MOST_ROWS
        and x.dtype in TYPES
        and all(
            isinstance(t, Tensor)
            and type(t) in (Tensor, torch.nn.Parameter)
            and (t.dtype, t.device) == (x.dtype, x.device)
            and (t.numel() > 0 and t.stride(-1) == 1)
            for t in (weight, bias, residual)
            if t is not None
        )
    )


# ---------------------------------------------------------------------------------------------- which is faster

#: Whether the kernel is faster, by device, dtype, number of rows up to a power of two, n, k, and what is added.
_FASTER: dict[tuple[Any, ...], bool] = {}

Stopwatch = Callable[[Callable[[], object]], float]


def stopwatch(device: torch.device, cuda: Any = torch.cuda) -> Stopwatch | None:
    """Return what times work on a device, in milliseconds.

    None where nothing can be timed: on a CPU, and while a graph is captured.

    Args:
        device: The device.
        cuda: Module that knows it; tests pass their own.
    """
    if device.type != "cuda" or cuda.is_current_stream_capturing():
        return None

    def milliseconds(work: Callable[[], object]) -> float:
        with cuda.device(device):
            other = torch.empty(cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
            found = []
            for _ in range(REPETITIONS):
                start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                other.zero_()  # in a model, other matrices have been read since
                cuda._sleep(WAIT_CYCLES)
                start.record()
                work()
                end.record()
                end.synchronize()
                found.append(float(start.elapsed_time(end)))
        return median(found)

    return milliseconds


def _is_faster(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    rows = triton.next_power_of_2(len(x))
    key = (x.device, x.dtype, rows, *weight.shape, bias is None, residual is None)
    faster = _FASTER.get(key)
    if faster is None:
        time = stopwatch(x.device)
        if time is None:
            return False
        faster = _FASTER[key] = _trial(time, rows, weight, bias, residual is not None)
    return faster


def _trial(time: Stopwatch, rows: int, weight: Tensor, bias: Tensor | None, adds: bool) -> bool:
    """Whether the kernel gives torch's product of this matrix with random rows, in less time."""
    (n, k), dtype, device = weight.shape, weight.dtype, weight.device
    generator = torch.Generator(device).manual_seed(0)
    try:
        x = torch.randn(rows, k, generator=generator, device=device).to(dtype)
        base = torch.randn(rows, n, generator=generator, device=device).to(dtype) if adds else None
        got, want = (
            run(x, weight, bias, None if base is None else base.clone()).float() for run in (multiply, by_torch)
        )
        apart = float((got - want).abs().max() / want.abs().max().clamp(min=torch.finfo(dtype).tiny))
        if not apart <= TOLERANCE[dtype]:
            _say(f"({rows}, {k}) x ({n}, {k}) of {dtype} differs by {apart:.1e} of the largest number")
            return False
        ours = time(lambda: multiply(x, weight, bias, base))
        return ours <= MOST_TIME * time(lambda: by_torch(x, weight, bias, base))
    except (OptionError, torch.OutOfMemoryError) as error:
        _say(str(error))
        return False


@cache
def _say(reason: str) -> None:
    _log.warning("products of few rows are left to cuBLAS, not the kernel: %s", reason)
