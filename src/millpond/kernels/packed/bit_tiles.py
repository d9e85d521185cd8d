"""Packing of codes into words, and unpacking.

A word of 32 bits holds 32 / b codes of one lane: code 2k in bits b * k of the low half, code 2k + 1 in those of the
high half, so that a shift and a mask yield a pair of neighbours. A code of three bits lies in two parts: two bits in
words of 16 codes, the third in words of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.packed.layout import LANES


def split(x: Tensor, axis: int, size: int) -> Tensor:
    """Axis `axis` as two, the second of `size`."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def pack(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Codes (..., depth, 16) int64 -> words (..., n, 16) int32, and those of the third bits."""
    if bits == 3:
        return _pack(codes & 3, 2), _pack(codes >> 2, 1)
    return _pack(codes, bits), None


def unpack(words: Tensor, top: Tensor | None, bits: int, depth: int) -> Tensor:
    """The codes (..., depth, 16) int64 that `pack` put into words."""
    if top is not None:
        return _unpack(words, 2)[..., :depth, :] | _unpack(top, 1)[..., :depth, :] << 2
    return _unpack(words, bits)[..., :depth, :]


def _shifts(bits: int, device: torch.device) -> Tensor:
    e = torch.arange(32 // bits, device=device)
    return (bits * (e // 2) + 16 * (e % 2))[:, None]


def _pack(codes: Tensor, bits: int) -> Tensor:
    per = 32 // bits
    depth = codes.shape[-2]
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -depth % per))
    words = (split(codes, -2, per) << _shifts(bits, codes.device)).sum(-2)
    return ((words + 2**31) % 2**32 - 2**31).int()


def _unpack(words: Tensor, bits: int) -> Tensor:
    wide = words.long()[..., None, :] >> _shifts(bits, words.device)
    return (wide & ((1 << bits) - 1)).flatten(-3, -2)


def key_lanes(x: Tensor) -> Tensor:
    """(..., slots, dim) -> (..., slots / 16, dim, 16): lanes are slots."""
    return split(x, -2, LANES).transpose(-1, -2)


def from_key_lanes(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).flatten(-3, -2)


def value_lanes(x: Tensor) -> Tensor:
    """(..., slots, dim) -> (..., dim / 16, slots, 16): lanes are channels."""
    return split(x, -1, LANES).transpose(-3, -2)


def from_value_lanes(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2, -1)
