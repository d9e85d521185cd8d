"""Decoder ops besides attention as one foreign call each, and all layers of a decoder in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from struct import Struct

import torch
from torch import Tensor

from millpond.kernels.args import StepRegions
from millpond.kernels.linear import has_products
from millpond.kernels.native import library
from millpond.kernels.native.abi import DecodeValues, decode_struct
from millpond.kernels.native.pages import PACKED_BYTES, regions_struct
from millpond.kernels.native.structs import DTYPES, INT32, entry_point, run
from millpond.kernels.quantized_weight import GROUP, QuantizedWeight, Weight
from millpond.kernels.thread_count import thread_count

#: the order of fields is that of csrc/common/args.hpp
LINEAR_ROWS = Struct("=8q").pack
LINEAR_SAME = Struct("=28qd").pack
ROTATE = Struct("=15q").pack
NORM = Struct("=14qd").pack
GATE = Struct("=8q").pack
GEMM = Struct("=14qd").pack
#: Fewer rows are not worth packing the matrix for: torch's kernels pack less.
MANY_ROWS = 96
BEHIND = Struct("=5q").pack
WIDEN = Struct("=9q").pack
LARGEST = Struct("=8q").pack


class Linears:
    """Matrices that rows go through together: weights (n, k) of contiguous rows and one dtype.

    Or all in codes, of 4 bits or 8 each, for rows of one dtype. norm, norm_bias: (k,), those of a norm in front: see
    `norm`. gate: a `Gate`, of the one part; or two parts become one result, gate(first) * second. The tensors must stay
    in place as long as this is called; it does not keep them.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Weight, Tensor | None]],
        *,
        norm: Tensor | None = None,
        norm_bias: Tensor | None = None,
        eps: float = 0.0,
        centred: bool = False,
        gate: int = 0,
    ) -> None:
        first = parts[0][0]
        self._dtype, self._width = first.dtype, first.shape[1]
        self._widths = [len(weight) for weight, _ in (parts[:1] if gate else parts)]
        self._unused = (0,) * (4 - len(self._widths))
        numbers: list[int] = []
        for weight, bias in parts:
            codes, scales = (weight, 0) if isinstance(weight, Tensor) else (weight.codes, weight.scales.data_ptr())
            numbers += (codes.data_ptr(), 0 if bias is None else bias.data_ptr(), scales, len(weight), codes.stride(0))
        numbers += (0,) * (20 - len(numbers))
        #: the part of the C struct that is the same for all rows
        self.same = LINEAR_SAME(
            0 if norm is None else norm.data_ptr(),
            0 if norm_bias is None else norm_bias.data_ptr(),
            self._width,
            DTYPES[self._dtype],
            gate,
            len(parts),
            centred,
            sum({weight.bits for weight, _ in parts if isinstance(weight, QuantizedWeight)}),
            *numbers,
            eps,
        )
        #: the C struct of no rows, for calls that fill them in
        self.blank = LINEAR_ROWS(*(0,) * 8) + self.same
        self._call = entry_point("mp_linear")

    @property
    def width(self) -> int:
        """Numbers of a row of the first result."""
        return self._widths[0]

    def heads(self, x: Tensor, dim: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v (N, heads, dim) of contiguous x (N, k), q and k rotated.

        Three parts; cos, sin: (N, <= dim), as for `rotate_`.
        """
        outs, cos, sin = self.room_for_heads(len(x), dim), cos.contiguous(), sin.contiguous()
        before, behind = self.heads_struct(x, cos, sin, *outs)
        run("mp_heads", "the linear kernel", before + self.same + behind)
        return outs

    def room_for_heads(self, n: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return uninitialised queries, keys and values (n, heads, dim)."""
        q, k, v = (torch.empty((n, width // dim, dim), dtype=self._dtype) for width in self._widths)
        return q, k, v

    def heads_struct(self, x: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[bytes, bytes]:
        """Return the C struct of `heads`: the parts before and after `same`.

        All tensors are contiguous.
        """
        rows = (x.data_ptr(), 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), *self._unused, len(x), thread_count())
        return LINEAR_ROWS(*rows), _rotation(q, k, cos, sin)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> list[Tensor]:
        """Return (..., n) of x (..., k) for each part.

        residual: (..., n) of the first part, contiguous, added to it.
        """
        x = x.contiguous()
        lead = x.shape[:-1]
        outs = [torch.empty((*lead, n), dtype=self._dtype) for n in self._widths]
        failed = self._call(
            LINEAR_ROWS(
                x.data_ptr(),
                0 if residual is None else residual.data_ptr(),
                *[out.data_ptr() for out in outs],
                *self._unused,
                x.numel() // self._width,
                thread_count(),
            )
            + self.same
        )
        if failed:
            raise MemoryError("no memory for the work space of the linear kernel")
        return outs


class Behind:
    """Rest of a layer after attention, made ready once; each of the three has one result.

    See `Linears`.
    """

    def __init__(self, out: Linears, up: Linears, down: Linears) -> None:
        #: the part of the C struct that is the same for all rows
        self.same = out.blank + up.blank + down.blank
        self._width = down.width
        self._call = entry_point("mp_behind")

    def __call__(self, seen: Tensor, x: Tensor) -> Tensor:
        """Return (N, width): x += out(seen), then x + down(up(x)).

        Contiguous rows: seen (N, k) and x (N, width).
        """
        result = torch.empty((len(x), self._width), dtype=x.dtype)
        if self._call(self.struct(seen, x, result) + self.same):
            raise MemoryError("no memory for the work space of the linear kernel")
        return result

    @staticmethod
    def struct(seen: Tensor, x: Tensor, result: Tensor) -> bytes:
        """Return the part of the C struct before `same`.

        All tensors are contiguous; the result may be x.
        """
        return BEHIND(seen.data_ptr(), x.data_ptr(), result.data_ptr(), len(x), thread_count())


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return (..., n) of x (..., k), weight (n, k) or codes, bias (n,), all of one dtype.

    Rows of the weight are contiguous.
    """
    return Linears(((weight, bias),))(x)[0]


def widen(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers (n, k) of a `QuantizedWeight`, each rounded once from float32."""
    codes, scales = codes.contiguous(), scales.contiguous()
    groups = codes.shape[1]
    out = torch.empty((len(codes), groups * GROUP), dtype=dtype)
    entry_point("mp_widen")(
        WIDEN(
            codes.data_ptr(),
            scales.data_ptr(),
            out.data_ptr(),
            0,
            len(codes),
            out.shape[1],
            8 * codes.shape[2] // GROUP,
            DTYPES[dtype],
            thread_count(),
        )
    )
    return out


def rotate_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `dim` numbers of q and k (N, heads, >= dim) in place by cos and sin.

    cos and sin (N, dim), all of one dtype. The numbers of a head are adjacent; rows and heads may be anywhere.
    """
    cos, sin = cos.contiguous(), sin.contiguous()
    run("mp_rotate", "the rotation", _rotation(q, k, cos, sin))


def _rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bytes:
    """Return the C struct of `rotate_`; cos and sin are contiguous."""
    dim, heads = cos.shape[-1], (*q.shape[:2], k.shape[1])
    addresses, strides = map(torch.Tensor.data_ptr, (q, k, cos, sin)), (*q.stride()[:2], *k.stride()[:2])
    return ROTATE(*addresses, *heads, dim, dim, *strides, DTYPES[q.dtype], thread_count())


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, centred: bool = False) -> Tensor:
    """Return RMSNorm, or LayerNorm if `centred`, of the last dimension of x, contiguous.

    x (N, n) or (N, heads, n), weight and bias (n,). The numbers of a head are adjacent; rows and heads may be anywhere.
    """
    n = x.shape[-1]
    heads = x.shape[1] if x.ndim == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype)
    struct = NORM(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        len(x),
        heads,
        n,
        x.stride(0),
        x.stride(1),
        heads * n,
        n,
        DTYPES[x.dtype],
        centred,
        thread_count(),
        eps,
    )
    run("mp_norm", "the norm", struct)
    return out


def gate(x: Tensor, act: int) -> Tensor:
    """Return (N, n): act(first half) * second half of x (N, 2 n); act is a `Gate`.

    Rows of x are contiguous.
    """
    n = x.shape[1] // 2
    out = torch.empty((len(x), n), dtype=x.dtype)
    struct = GATE(x.data_ptr(), out.data_ptr(), len(x), n, x.stride(0), DTYPES[x.dtype], act, thread_count())
    run("mp_gate", "the gate", struct)
    return out


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, Tensor | None, float, bool] | None = None,
    residual: Tensor | None = None,
    act: int = 0,
    halves: bool = False,
) -> Tensor:
    """Return act(norm(x) weight^T + bias) + residual of many rows.

    All of bf16 and contiguous, if `gemm_serves`. Each step is rounded as a layer of its own would.

    Args:
        x: (N, k).
        weight: (n, k).
        bias: (n,), or None.
        norm: Weight (k,), bias (k,) or None, eps, and whether it is centred: see `norm`.
        residual: (N, n), or None.
        act: A `Gate` but GELU, 0 for none.
        halves: Weight is (2 n, k), bias (2 n,): act(first half) * second half.
    """
    x = x.contiguous()
    n = len(weight) // 2 if halves else len(weight)
    out = torch.empty((len(x), n), dtype=x.dtype)
    scale, shift, eps, centred = norm or (None, None, 0.0, False)
    optional = (0 if t is None else t.data_ptr() for t in (bias, scale, shift, residual))
    struct = GEMM(
        x.data_ptr(),
        weight.data_ptr(),
        *optional,
        out.data_ptr(),
        len(x),
        x.shape[1],
        n,
        halves,
        act,
        centred,
        thread_count(),
        eps,
    )
    run("mp_gemm", "the matrix kernel", struct)
    return out


def gemm_serves(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemm` takes these rows and is the faster.

    Torch's is faster if the hardware has whole tiles (AMX), and for fewer than MANY_ROWS if it multiplies bf16 at all.
    """
    return (
        x.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
        and x.shape[1] % 32 == 0
        and (len(x) >= MANY_ROWS or not has_products(x))
        and weight.is_contiguous()
        and _has_gemm()
    )


@cache
def _has_gemm() -> bool:
    loaded = library.load()
    return loaded is not None and loaded[0].startswith(("v3", "v4")) and not torch.cpu._is_amx_tile_supported()


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N,) float32 and int64: the largest number of each row, and its first index.

    x (N, n), its rows contiguous. NaN where a row has one.
    """
    maxima, at = torch.empty(len(x), dtype=torch.float32), torch.empty(len(x), dtype=torch.int64)
    entry_point("mp_largest")(
        LARGEST(
            x.data_ptr(),
            maxima.data_ptr(),
            at.data_ptr(),
            len(x),
            x.shape[1],
            x.stride(0),
            DTYPES[x.dtype],
            thread_count(),
        )
    )
    return maxima, at


COUNT = Struct("=q").pack
#: in place of the struct of packed regions, if there are none
NOT_PACKED = bytes(PACKED_BYTES)


class Layers:
    """Matrices and norms of layers with q, k, v of three matrices and RoPE, made ready once.

    The tensors must stay in place as long as this is called; it does not keep them.
    """

    def __init__(self, parts: Sequence[tuple[Linears, Behind]], head_dim: int) -> None:
        self._parts, self._dim = parts, head_dim
        self._call = entry_point("mp_layers")

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, regions: Sequence[StepRegions]) -> Tensor:
        """Run rows x (N, width), contiguous, one of each sequence, through all layers in place.

        Args:
            x: (N, width), contiguous; changed in place.
            cos: (N, <= head_dim), as for `rotate_`.
            sin: (N, <= head_dim), as for `rotate_`.
            regions: Regions of each layer; lengths and pages change as in `ops.decode`.

        Returns:
            (layers, N, n_heads): the log-sum-exp of each layer's attention.
        """
        first, cos, sin = self._parts[0][0], cos.contiguous(), sin.contiguous()
        q, k, v = heads = first.room_for_heads(len(x), self._dim)
        seen = torch.empty((*q.shape[:2], v.shape[-1]), dtype=x.dtype)
        lse = torch.empty((len(regions), *q.shape[:2]), dtype=torch.float32)
        evicted = torch.empty(len(x) * k.shape[1], dtype=INT32)
        before, turn = first.heads_struct(x, cos, sin, *heads)
        behind = Behind.struct(seen, x, x)
        structs, kept = [COUNT(len(regions))], list[DecodeValues]()
        for (into, rest), r, sums in zip(self._parts, regions, lse, strict=True):
            if r.packed is not None:
                r.packed.check(len(r.plain.table), r.plain.pages.key_dim)
            kept.append(values := DecodeValues.of(q, k, v, r))  # a struct keeps no tensor
            decoding = decode_struct(values, seen, sums, evicted)
            packed = NOT_PACKED if r.packed is None else regions_struct(r.packed)
            structs += (before, into.same, turn, decoding, packed, behind, rest.same)
        if self._call(b"".join(structs)):
            raise MemoryError("no memory for the work space of a layer")
        return lse
