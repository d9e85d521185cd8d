"""Decoder ops besides attention: matrix products, norms, rotary embedding, activations; few rows run natively."""

from __future__ import annotations

import enum
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from millpond.kernels import native
from millpond.kernels.args import DecodeArgs
from millpond.kernels.backends import NATIVE_DTYPES
from millpond.kernels.linear import FEW_ROWS, filled_up, has_products, multiply_rows
from millpond.kernels.quantized_weight import Weight
from millpond.kernels.thread_count import torch_on_all_threads


class GatedActivation(enum.IntEnum):
    """Activation of a gated feed-forward block; numbers as in the kernels."""

    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4


_PLAIN = (torch.nn.Parameter, Tensor)


def fits(x: Tensor, weights: Iterable[Tensor | None]) -> bool:
    """Whether the native kernels take x (..., n) with these weights.

    They do where x has few rows and all is on a CPU in one dtype, with contiguous rows, and the caller needs no
    gradients, autocast or another implementation.
    """
    from millpond.kernels import native

    dtype = x.dtype
    return (
        0 < x.numel() <= FEW_ROWS * x.shape[-1]
        and x.is_cpu
        and dtype in NATIVE_DTYPES
        and type(x) is Tensor
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
        and all(w is None or _is_plain(w, dtype) for w in weights)
        and native.is_available()
    )


def _is_plain(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.dtype is dtype and weight.is_cpu and type(weight) in _PLAIN and weight.is_contiguous()


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest number of each row of x (N, n), and its first index: (N,) each.

    NaN where a row has one.
    """
    from millpond.kernels import native

    is_wanted = os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
    if (
        is_wanted
        and x.is_cpu
        and x.dtype in NATIVE_DTYPES
        and x.stride(-1) == 1
        and x.numel()
        and native.is_available()
    ):
        return native.largest(x)
    maxima, at = x.max(-1)
    return maxima, at


#: Most relative difference between what a part of a model gives and what is computed here in its place, by dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_ACTIVATE: dict[GatedActivation, Callable[[Tensor], Tensor]] = {
    GatedActivation.SILU: functional.silu,
    GatedActivation.GELU: lambda x: functional.gelu(x.contiguous()),  # of strided rows other bits come out
    GatedActivation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    GatedActivation.RELU: functional.relu,
}


class Norm(NamedTuple):
    """RMSNorm, or LayerNorm if `centred`; weight and bias (n,)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


@dataclass(frozen=True)
class Projection:
    """Linear layers of the same rows: weights (n, k), plain or all quantized, and biases (n,).

    Attributes:
        whole: Weight and bias of all parts, one after another, which the parts are views of; None if they are not
            adjacent.
        norm: Norm of the rows before.
        act: Activation of the output of the first part.
    """

    parts: tuple[tuple[Weight, Tensor | None], ...]
    whole: tuple[Weight, Tensor | None] | None
    norm: Norm | None = None
    act: GatedActivation | None = None

    @cached_property
    def few(self) -> native.Linears:
        """Kernel for a few rows on a CPU, valid as long as the weights stay in place."""
        gate = 0 if self.act is None else int(self.act)
        if self.norm is None:
            return native.Linears(self.parts, gate=gate)
        weight, bias, eps, centred = self.norm
        return native.Linears(self.parts, norm=weight, norm_bias=bias, eps=eps, centred=centred, gate=gate)


@dataclass(frozen=True)
class Rest:
    """Projections after attention in a layer: its output matrix, and two of the feed-forward."""

    out: Projection
    up: Projection
    down: Projection

    @cached_property
    def few(self) -> native.Behind:
        """Kernel for a few rows on a CPU, as `Projection.few`."""
        return native.Behind(self.out.few, self.up.few, self.down.few)


def in_one_call(layers: Iterable[tuple[Projection, Rest]], head_dim: int) -> native.Layers:
    """Return layers for a few rows on a CPU, one of each sequence, attention included.

    None if they cannot run so; otherwise as `Projection.few`.
    """
    return native.Layers([(into.few, rest.few) for into, rest in layers], head_dim)


class DecoderOps:
    """Rows through torch.

    Attributes:
        few: Whether the rows are few, and native kernels take them.
        turns_late: Whether queries and keys had better be rotated by the kernels of attention that read them.
    """

    few = False
    turns_late = False

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalize the last dimension of x (N, n) or (N, heads, n)."""
        weight, bias, eps, centred = norm
        if centred:
            return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """Return x (N, k) through one matrix: (N, n)."""
        return multiply_rows(x, weight, bias)

    def apart(self, x: Tensor, projection: Projection) -> list[Tensor]:
        """Return norm(x) through each matrix: (N, n) each, with contiguous rows."""
        x = x if projection.norm is None else self.norm(x, projection.norm)
        if projection.whole is None:
            return [self.product(x, *part) for part in projection.parts]
        together = self.product(x, *projection.whole)
        return list(torch.split(together, [len(weight) for weight, _ in projection.parts], -1))

    def activated(self, x: Tensor, projection: Projection) -> Tensor:
        """Return act(norm(x) through the matrix).

        Of two matrices it is that of the first times the output of the second.
        """
        assert projection.act is not None, "of a feed-forward"
        return self.gated(self.apart(x, projection), projection.act)

    def gated(self, parts: list[Tensor], act: GatedActivation) -> Tensor:
        """Return act(parts[0]), times parts[1] if there is one: (N, n) each."""
        opened, *closed = parts
        opened = _ACTIVATE[act](opened)
        return opened * closed[0] if closed else opened

    def added(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        """Return x through the matrix, plus the residual (N, n), whose memory the sum may take."""
        ((weight, bias),) = projection.parts
        if bias is None and isinstance(weight, Tensor) and has_products(x):
            rows, more = filled_up(x), filled_up(residual)
            with torch_on_all_threads():
                return torch.addmm(more, rows, weight.t())[: len(x)]
        return multiply_rows(x, weight, bias).add_(residual)

    def heads(
        self, x: Tensor, projection: Projection, dim: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v (N, heads, dim) of three matrices; q and k are rotated by `rotate_`."""
        q, k, v = (part.view(len(x), -1, dim) for part in self.apart(x, projection))
        self.rotate_(q, k, cos, sin)
        return q, k, v

    def behind(self, seen: Tensor, x: Tensor, rest: Rest) -> Tensor:
        """Return x (N, width) after a layer with attention `seen` (N, k).

        x += out(seen), then x + down(up(x)).
        """
        x = self.added(seen, rest.out, x)
        return self.added(self.activated(x, rest.up), rest.down, x)

    def rotate_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `dim` numbers of heads of q and k (N, heads, >= dim) in place.

        cos, sin: (N, dim).
        """
        dim = cos.shape[-1]
        half = dim // 2
        for x in (q, k):
            turning = x[..., :dim]
            turned = torch.cat((-turning[..., half:], turning[..., :half]), -1)
            turning.copy_(turning * cos[:, None] + turned * sin[:, None])


class NativeDense(DecoderOps):
    """Rows through native kernels; matrices of many rows through torch unless `gemm` serves."""

    def __init__(self, few: bool) -> None:
        self.few = few

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight, bias, eps, centred = norm
        return native.norm(x, weight, bias, eps=eps, centred=centred)

    def apart(self, x: Tensor, projection: Projection) -> list[Tensor]:
        if self.few:
            return projection.few(x)
        joined = projection.whole
        if joined is None:  # weights that lie apart: the same sums, matrix by matrix
            x = x if projection.norm is None else self.norm(x, projection.norm)
            return [
                native.gemm(x, weight, bias) if _gemm_serves(weight, x) else multiply_rows(x, weight, bias)
                for weight, bias in projection.parts
            ]
        if not _gemm_serves(joined[0], x):
            return super().apart(x, projection)
        together = native.gemm(x, joined[0], joined[1], norm=projection.norm)
        return list(torch.split(together, [len(weight) for weight, _ in projection.parts], -1))

    def activated(self, x: Tensor, projection: Projection) -> Tensor:
        if self.few:
            return projection.few(x)[0]
        act, joined, halves = projection.act, projection.whole, len(projection.parts) == 2
        if act is None or act is GatedActivation.GELU or joined is None:  # torch's erf is the faster
            return super().activated(x, projection)
        if _gemm_serves(joined[0], x):
            return native.gemm(x, joined[0], joined[1], norm=projection.norm, act=act, halves=halves)
        if not halves:
            return super().activated(x, projection)
        x = x if projection.norm is None else self.norm(x, projection.norm)
        return native.gate(multiply_rows(x, *joined), act)

    def added(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        if self.few:
            return projection.few(x, residual)[0]
        ((weight, bias),) = projection.parts
        if not _gemm_serves(weight, x):
            return super().added(x, projection, residual)
        return native.gemm(x, weight, bias, residual=residual)

    def heads(
        self, x: Tensor, projection: Projection, dim: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.few:
            return projection.few.heads(x.contiguous(), dim, cos, sin)
        return super().heads(x, projection, dim, cos, sin)

    def behind(self, seen: Tensor, x: Tensor, rest: Rest) -> Tensor:
        return rest.few(seen.contiguous(), x.contiguous()) if self.few else super().behind(seen, x, rest)

    def rotate_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        native.rotate_(q, k, cos, sin)


class FixedOrder(DecoderOps):
    """Rows through native kernels for a few: a row's bits do not depend on other rows."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return _FEW.norm(x, norm)

    def apart(self, x: Tensor, projection: Projection) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*(projection.few(part) for part in _pieces(x)), strict=True)]

    def activated(self, x: Tensor, projection: Projection) -> Tensor:
        return torch.cat([projection.few(part)[0] for part in _pieces(x)])

    def added(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        pieces = zip(_pieces(x), _pieces(residual), strict=True)
        return torch.cat([projection.few(part, rest)[0] for part, rest in pieces])

    def heads(
        self, x: Tensor, projection: Projection, dim: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        pieces = zip(_pieces(x), _pieces(cos), _pieces(sin), strict=True)
        heads = [projection.few.heads(part, dim, *angles) for part, *angles in pieces]
        q, k, v = (torch.cat(parts) for parts in zip(*heads, strict=True))
        return q, k, v

    def behind(self, seen: Tensor, x: Tensor, rest: Rest) -> Tensor:
        return torch.cat([rest.few(*parts) for parts in zip(_pieces(seen), _pieces(x), strict=True)])

    def rotate_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        native.rotate_(q, k, cos, sin)


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x.contiguous(), FEW_ROWS)


def _gemm_serves(weight: Weight, x: Tensor) -> TypeGuard[Tensor]:
    return isinstance(weight, Tensor) and native.gemm_serves(x, weight)


_TORCH, _FEW, _MANY, _FIXED = DecoderOps(), NativeDense(few=True), NativeDense(few=False), FixedOrder()


def choose(x: Tensor, few: bool | None = None, *, fixed_order: bool = False) -> DecoderOps:
    """Return the implementation for rows like x (N, width) without gradients.

    Args:
        x: Rows.
        few: Whether to treat them as few rows; None decides by their number.
        fixed_order: Give each row the bits that it has alone.
    """
    if not serves(x):
        return _fused() if _fuses(x) else _TORCH
    if len(x) <= FEW_ROWS if few is None else few:
        return _FEW
    return _FIXED if fixed_order else _MANY


def turned(args: DecodeArgs) -> DecodeArgs:
    """Return a step whose queries and keys are rotated by its angles, in place."""
    if args.angles is None:
        return args
    choose(args.q.flatten(1)).rotate_(args.q, args.k_new, *args.angles)
    return replace(args, angles=None)


def _fuses(x: Tensor) -> bool:
    """Whether the Triton kernels compute rows like x (N, width), chosen as by `ops.op_set`."""
    forced = os.environ.get("MILLPOND_KERNELS", "auto")
    return (
        (forced == "gpu" or (forced == "auto" and x.is_cuda))
        and x.dtype in NATIVE_DTYPES
        and not torch.is_autocast_enabled(x.device.type)
        and importlib.util.find_spec("triton") is not None
    )


@cache
def _fused() -> DecoderOps:
    """Return the ops in Triton, imported when a GPU computes rows."""
    from millpond.kernels.gpu.dense import FusedDense

    return FusedDense()


def serves(x: Tensor) -> bool:
    """Whether native kernels compute rows like x (N, width)."""
    return (
        x.is_cpu
        and x.dtype in NATIVE_DTYPES
        and os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
        and not torch.is_autocast_enabled("cpu")
        and native.is_available()
    )
