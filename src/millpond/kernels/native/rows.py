"""What a decoder does to rows besides attention: matrices, norms, rotary embedding, gates; one foreign call each."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import torch
from torch import Tensor

from millpond.kernels.native.calls import DTYPES, entry_point

#: the order of fields is that of csrc/args.hpp
LINEAR = Struct("=32qd").pack
ROTATE = Struct("=15q").pack
NORM = Struct("=14qd").pack
GATE = Struct("=8q").pack


def linears(
    x: Tensor,
    parts: Sequence[tuple[Tensor, Tensor | None]],
    *,
    norm: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 0.0,
    centred: bool = False,
    gate: int = 0,
    residual: Tensor | None = None,
) -> list[Tensor]:
    """X (..., k) times each weight (n, k) with contiguous rows, plus its bias (n,) -> (..., n) each, all of one dtype.

    norm, norm_bias: (k,), those of a norm of x: see `norm`. gate: a `Gate`, of the one part; or two parts become one
    result, gate(first) * second. residual: (..., n) of the first part, added to it.
    """
    k = x.shape[-1]
    x = x.contiguous()
    count = 1 if gate else len(parts)
    lead, dtype = x.shape[:-1], x.dtype
    outs: list[Tensor] = []
    numbers: list[int] = []
    for weight, bias in parts:
        n = weight.shape[0]
        if len(outs) < count:
            outs.append(torch.empty((*lead, n), dtype=dtype))
        numbers += (
            weight.data_ptr(), 0 if bias is None else bias.data_ptr(), outs[-1].data_ptr(), n, weight.stride(0)
        )  # fmt: skip
    numbers += (0,) * (20 - len(numbers))
    failed = entry_point("mp_linear")(LINEAR(
        x.data_ptr(), 0 if norm is None else norm.data_ptr(), 0 if norm_bias is None else norm_bias.data_ptr(),
        0 if residual is None else residual.data_ptr(), x.numel() // k, k, k, DTYPES[dtype], gate, len(parts), centred,
        torch.get_num_threads(), *numbers, eps,
    ))  # fmt: skip
    if failed:
        raise MemoryError("no memory for the work space of the linear kernel")
    return outs


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X (..., k), weight (n, k) with contiguous rows, bias (n,), all of one dtype -> (..., n)."""
    return linears(x, ((weight, bias),))[0]


def rotate_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the first `dim` numbers of q and k (N, heads, >= dim) in place by cos and sin (N, dim), all of one dtype.

    The numbers of a head lie behind each other; rows and heads may lie anywhere.
    """
    cos, sin = cos.contiguous(), sin.contiguous()
    dim = cos.shape[-1]
    failed = entry_point("mp_rotate")(ROTATE(
        q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), len(q), q.shape[1], k.shape[1], dim, dim,
        *q.stride()[:2], *k.stride()[:2], DTYPES[q.dtype], torch.get_num_threads(),
    ))  # fmt: skip
    if failed:
        raise MemoryError("no memory for the work space of the rotation")


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, centred: bool = False) -> Tensor:
    """RMSNorm, or LayerNorm where `centred`, of the last dimension: x (N, n) or (N, heads, n), weight and bias (n,).

    The numbers of a head lie behind each other; rows and heads may lie anywhere. The result is contiguous.
    """
    n = x.shape[-1]
    heads = x.shape[1] if x.ndim == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype)
    failed = entry_point("mp_norm")(NORM(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), len(x), heads, n,
        x.stride(0), x.stride(1), heads * n, n, DTYPES[x.dtype], centred, torch.get_num_threads(), eps,
    ))  # fmt: skip
    if failed:
        raise MemoryError("no memory for the work space of the norm")
    return out


def gate(x: Tensor, act: int) -> Tensor:
    """X (N, 2 n), its rows contiguous -> (N, n): act(first half) * second half; act: a `Gate`."""
    n = x.shape[1] // 2
    out = torch.empty((len(x), n), dtype=x.dtype)
    failed = entry_point("mp_gate")(GATE(
        x.data_ptr(), out.data_ptr(), len(x), n, x.stride(0), DTYPES[x.dtype], act, torch.get_num_threads()
    ))  # fmt: skip
    if failed:
        raise MemoryError("no memory for the work space of the gate")
    return out
