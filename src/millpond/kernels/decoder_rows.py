"""Conditions under which native kernels run decoder ops on a few rows.

The kernels (`native.Linears`, `native.norm`, `native.rotate_`) compute what the layers of transformers compute and
round where torch would write to memory, so that they agree with them up to the order of sums.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from millpond.kernels.backends import NATIVE_DTYPES
from millpond.kernels.linear import FEW_ROWS


class GatedActivation(enum.IntEnum):
    """The activation of a gated feed-forward block; numbers as in the kernels."""

    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4


_PLAIN = (torch.nn.Parameter, Tensor)


def fits(x: Tensor, weights: Iterable[Tensor | None]) -> bool:
    """Whether the native kernels take x (..., n) with these weights.

    They do where x has few rows and all lies on a CPU in one dtype, with contiguous rows, and the caller needs no
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
    """X (N, n) -> (N,) each: the largest number of each row, NaN where it holds one, and its index, the first."""
    from millpond.kernels import native

    wanted = os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
    if wanted and x.is_cpu and x.dtype in NATIVE_DTYPES and x.stride(-1) == 1 and x.numel() and native.is_available():
        return native.largest(x)
    most, at = x.max(-1)
    return most, at
