# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Decoder ops between matrix products in one Triton kernel each: norms, rotary embedding, activations.

They round where torch's ops do, so that a bfloat16 row keeps its numbers: sums and exponentials are in float32, and
what torch would store between two ops is rounded to the dtype of the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.decoder_ops import DecoderOps, GatedActivation, Norm, Projection
from millpond.kernels.gpu import few_rows
from millpond.kernels.gpu.common import TYPES, check, on_its_device, rows_of
from millpond.kernels.quantized_weight import Weight

SILU = tl.constexpr(int(GatedActivation.SILU))
GELU = tl.constexpr(int(GatedActivation.GELU))
GELU_TANH = tl.constexpr(int(GatedActivation.GELU_TANH))
ROOT_OF_HALF = tl.constexpr(0.5**0.5)

HEAD_TILE = 4  #: heads of a program of `rotate_heads`
GATE_BLOCK = 1024  #: numbers of a program of `gate_rows`
NORM_NUMBERS = 16  #: numbers of a row per thread in `normalize_rows`


@triton.jit
def normalize_rows(
    x,
    x_s,
    x_h,
    weight,
    bias,
    out,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write one row of RMSNorm, or of LayerNorm if CENTRED."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    ok = d < DIM
    wide = tl.load(x + (row // HEADS) * x_s + (row % HEADS) * x_h + d, mask=ok, other=0.0).to(tl.float32)
    factor = tl.load(weight + d, mask=ok, other=0.0).to(tl.float32)
    if CENTRED:
        wide = tl.where(ok, wide - tl.sum(wide, 0) / DIM, 0.0)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    if not CENTRED:
        y = y.to(out.dtype.element_ty).to(tl.float32)
    y = y * factor
    if HAS_BIAS:
        y += tl.load(bias + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + d, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def turn_heads(
    x,
    x_h,
    cos,
    sin,
    first,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Rotate heads first .. first + TILE - 1 of a row in place.

    Products and their sum are rounded to TYPE.
    """
    head = first + tl.arange(0, TILE)
    d = tl.arange(0, HALF_BLOCK)
    ok = (head < HEADS)[:, None] & (d < HALF)[None, :]
    at = x + head[:, None] * x_h + d[None, :]
    left = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=ok, other=0.0).to(tl.float32)
    cos_left = tl.load(cos + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    cos_right = tl.load(cos + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_left = tl.load(sin + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_right = tl.load(sin + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    new_left = (left * cos_left).to(TYPE).to(tl.float32) - (right * sin_left).to(TYPE).to(tl.float32)
    new_right = (right * cos_right).to(TYPE).to(tl.float32) + (left * sin_right).to(TYPE).to(tl.float32)
    tl.store(at, new_left.to(TYPE).to(x.dtype.element_ty), mask=ok)
    tl.store(at + HALF, new_right.to(TYPE).to(x.dtype.element_ty), mask=ok)


@triton.jit
def rotate_heads(
    q,
    q_s,
    q_h,
    k,
    k_s,
    k_h,
    cos,
    cos_s,
    sin,
    sin_s,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Rotate a few heads of the queries or of the keys of a row in place."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    q_end: tl.constexpr = (Q_HEADS + TILE - 1) // TILE * TILE
    cos_row = cos + row * cos_s
    sin_row = sin + row * sin_s
    if first < q_end:
        turn_heads(q + row * q_s, q_h, cos_row, sin_row, first, Q_HEADS, HALF, HALF_BLOCK, TILE, TYPE)
    else:
        turn_heads(k + row * k_s, k_h, cos_row, sin_row, first - q_end, K_HEADS, HALF, HALF_BLOCK, TILE, TYPE)


@triton.jit
def activation(x, ACT: tl.constexpr):
    """Return the activation of x in float32; NaN stays NaN."""
    if ACT == SILU:
        return x / (1.0 + tl.exp(-x))
    elif ACT == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * ROOT_OF_HALF))
    elif ACT == GELU_TANH:
        # (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        return tl.where(x < 0.0, 0.0, x)


@triton.jit
def gate_rows(
    opened,
    opened_s,
    closed,
    closed_s,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
):
    """Write a part of a row of act(opened), times `closed` if GATED."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < WIDTH
    y = activation(tl.load(opened + row * opened_s + column, mask=ok, other=0.0).to(tl.float32), ACT)
    if GATED:
        y = y.to(out.dtype.element_ty).to(tl.float32)
        y = y * tl.load(closed + row * closed_s + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=ok)


# ---------------------------------------------------------------------------------------------- at launch


@on_its_device
def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Return `DecoderOps.norm` of x (N, n) or (N, heads, n) in x's dtype, contiguous.

    Raises:
        OptionError: as `common.check`.
    """
    check(x.device, x.dtype)
    x, dim = rows_of(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = triton.next_power_of_2(dim)
    normalize_rows[(out.numel() // dim,)](
        x,
        x.stride(0),
        x.stride(-2),
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        out,
        norm.eps,
        HEADS=x.shape[1] if x.ndim == 3 else 1,
        DIM=dim,
        BLOCK=block,
        CENTRED=norm.centred,
        HAS_BIAS=norm.bias is not None,
        num_warps=min(16, max(1, block // (32 * NORM_NUMBERS))),
    )
    return out


@on_its_device
def rotate_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads in place as `DecoderOps.rotate_`.

    Args:
        q: Queries (N, heads, >= dim), heads contiguous.
        k: Keys, likewise, in the same dtype.
        cos: Cosines (N, dim), dim even.
        sin: Sines, likewise.

    Raises:
        OptionError: as `common.check`.
    """
    check(q.device, q.dtype, cos.dtype)
    cos, sin, half = rows_of(cos), rows_of(sin), cos.shape[-1] // 2
    tiles = triton.cdiv(q.shape[1], HEAD_TILE) + triton.cdiv(k.shape[1], HEAD_TILE)
    if len(q) == 0 or half == 0 or tiles == 0:
        return
    rotate_heads[(len(q), tiles)](
        q,
        *q.stride()[:2],
        k,
        *k.stride()[:2],
        cos,
        cos.stride(0),
        sin,
        sin.stride(0),
        Q_HEADS=q.shape[1],
        K_HEADS=k.shape[1],
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        TILE=HEAD_TILE,
        TYPE=TYPES[torch.promote_types(q.dtype, cos.dtype)],
        num_warps=1,
        enable_fp_fusion=False,  # each product is rounded, as by torch
    )


@on_its_device
def gate(opened: Tensor, closed: Tensor | None, act: GatedActivation) -> Tensor:
    """Return act(opened), times `closed` if it is given: (N, n) each.

    Raises:
        OptionError: as `common.check`.
    """
    check(opened.device, opened.dtype)
    opened, n = rows_of(opened), opened.shape[-1]
    factor = opened if closed is None else rows_of(closed)
    out = torch.empty(opened.shape, dtype=opened.dtype, device=opened.device)
    if out.numel():
        gate_rows[(len(opened), triton.cdiv(n, GATE_BLOCK))](
            opened,
            opened.stride(0),
            factor,
            factor.stride(0),
            out,
            WIDTH=n,
            BLOCK=min(GATE_BLOCK, triton.next_power_of_2(n)),
            ACT=int(act),
            GATED=closed is not None,
        )
    return out


class FusedDense(DecoderOps):
    """Rows through torch's products, or `few_rows`, with one kernel between two of them.

    What a kernel does not take, such as weights in another dtype than the rows, goes through torch.
    """

    turns_late = True

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        fits = norm.weight.dtype is x.dtype and norm.weight.is_contiguous()
        return normalize(x, norm) if fits else super().norm(x, norm)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return few_rows.product(x, weight, bias)

    def gated(self, parts: list[Tensor], act: GatedActivation) -> Tensor:
        opened, *closed = parts
        return gate(opened, closed[0] if closed else None, act)

    def added(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        ((weight, bias),) = projection.parts
        return few_rows.product(x, weight, bias, residual)

    def rotate_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        alike = q.dtype is k.dtype and cos.dtype is sin.dtype and cos.dtype in TYPES
        if alike and q.stride(-1) == k.stride(-1) == 1 and cos.shape[-1] % 2 == 0:
            rotate_(q, k, cos, sin)
        else:
            super().rotate_(q, k, cos, sin)
