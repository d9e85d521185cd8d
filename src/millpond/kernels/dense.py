"""What a decoder does to rows besides attention: matrices, norms, the rotary embedding, activations.

Rows are packed: x is (N, width), whatever sequences they belong to. `choose` says who computes: torch, or on a CPU the
native kernels, which do a few rows at the speed of memory and round where torch would write to memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from millpond.kernels import native
from millpond.kernels.ops import FEW_ROWS, NATIVE_DTYPES
from millpond.kernels.rows import Gate

_ACTIVATE: dict[Gate, Callable[[Tensor], Tensor]] = {
    Gate.SILU: functional.silu,
    Gate.GELU: functional.gelu,
    Gate.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Gate.RELU: functional.relu,
}


class Norm(NamedTuple):
    """RMSNorm, or LayerNorm where `centred`. weight, bias: (n,)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


class Matrices(NamedTuple):
    """Linear layers that take the same rows: weights (n, k) with their biases (n,) or None.

    whole: weight and bias of all behind each other, which the parts are views of; None where they lie apart.
    """

    parts: tuple[tuple[Tensor, Tensor | None], ...]
    whole: tuple[Tensor, Tensor | None] | None


class Dense:
    """Rows through torch."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Of the last dimension of x (N, n) or (N, heads, n)."""
        weight, bias, eps, centred = norm
        if centred:
            return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def apart(self, x: Tensor, matrices: Matrices, norm: Norm | None) -> list[Tensor]:
        """Norm(x) through each matrix: (N, n) each, with contiguous rows."""
        x = x if norm is None else self.norm(x, norm)
        if matrices.whole is None:
            return [functional.linear(x, *part) for part in matrices.parts]
        together = functional.linear(x, *matrices.whole)
        return list(torch.split(together, [len(weight) for weight, _ in matrices.parts], -1))

    def activated(self, x: Tensor, matrices: Matrices, norm: Norm | None, act: Gate) -> Tensor:
        """act(norm(x) through the matrix); of two matrices, that of the first times the outcome of the second."""
        opened, *closed = self.apart(x, matrices, norm)
        opened = _ACTIVATE[act](opened)
        return opened * closed[0] if closed else opened

    def added(self, x: Tensor, matrices: Matrices, residual: Tensor) -> Tensor:
        """X through the matrix, plus the residual (N, n)."""
        ((weight, bias),) = matrices.parts
        if bias is None:
            return torch.addmm(residual, x, weight.t())
        return functional.linear(x, weight, bias).add_(residual)

    def rotate_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn the first `dim` numbers of the heads of q and k (N, heads, >= dim) in place; cos, sin (N, dim)."""
        dim = cos.shape[-1]
        half = dim // 2
        for x in (q, k):
            turning = x[..., :dim]
            other = torch.cat((-turning[..., half:], turning[..., :half]), -1)
            turning.copy_(turning * cos[:, None] + other * sin[:, None])


class NativeDense(Dense):
    """Rows through the native kernels; matrices through torch where there are more rows than memory bounds."""

    def __init__(self, few: bool) -> None:
        self._few = few

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight, bias, eps, centred = norm
        return native.norm(x, weight, bias, eps=eps, centred=centred)

    def apart(self, x: Tensor, matrices: Matrices, norm: Norm | None) -> list[Tensor]:
        if not self._few:
            return super().apart(x, matrices, norm)
        return native.linears(x, matrices.parts) if norm is None else native.linears(x, matrices.parts, **_of(norm))

    def activated(self, x: Tensor, matrices: Matrices, norm: Norm | None, act: Gate) -> Tensor:
        if self._few:
            given = {} if norm is None else _of(norm)
            return native.linears(x, matrices.parts, gate=act, **given)[0]
        if matrices.whole is None or len(matrices.parts) != 2 or act is Gate.GELU:  # torch's erf takes many at once
            return super().activated(x, matrices, norm, act)
        x = x if norm is None else self.norm(x, norm)
        return native.gate(functional.linear(x, *matrices.whole), act)

    def added(self, x: Tensor, matrices: Matrices, residual: Tensor) -> Tensor:
        if self._few:
            return native.linears(x, matrices.parts, residual=residual.contiguous())[0]
        return super().added(x, matrices, residual)

    def rotate_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        native.rotate_(q, k, cos, sin)


def _of(norm: Norm) -> dict[str, Any]:
    return {"norm": norm.weight, "norm_bias": norm.bias, "eps": norm.eps, "centred": norm.centred}


_TORCH, _FEW, _MANY = Dense(), NativeDense(few=True), NativeDense(few=False)


def choose(x: Tensor, few: bool | None = None) -> Dense:
    """Who computes with rows like x (N, width), where nobody asks for gradients; `few`: as if they were, or not."""
    if not (
        x.is_cpu
        and x.dtype in NATIVE_DTYPES
        and os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
        and not torch.is_autocast_enabled("cpu")
        and native.is_available()
    ):
        return _TORCH
    return _FEW if (len(x) <= FEW_ROWS if few is None else few) else _MANY
