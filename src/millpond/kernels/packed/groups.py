"""Group quantization of numbers to codes and back; the arithmetic is the same bit for bit in every implementation.

Scales and zeros are float16, rounded before the codes are chosen, so that a code is nearest to what will be read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millpond.errors import NumericsError

#: The largest numbers of float16 and of e4m3.
MAX_F16, MAX_E4M3 = 65504.0, 448.0


#: What is said of numbers that no code can hold.
NOT_FINITE = (
    "a key or value to be stored as codes is NaN or infinite, which no code can hold; "
    "look for the layer that makes it, or keep the entries with codec='bf16'"
)
TOO_LARGE = (
    f"a key or value is beyond {MAX_F16:g}, the most that the scale of a group (float16) can hold; "
    "keep the entries with codec='bf16'"
)


class Groups(NamedTuple):
    """Codes (..., g) int64 with scale and zero (...) float16 of their group.

    zero is None if the format is symmetric.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def check_finite(x: Tensor) -> None:
    """Check that numbers to be encoded are finite.

    Raises:
        NumericsError: NaN or infinity among numbers that are to be encoded.
    """
    if not bool(torch.isfinite(x).all()):
        raise NumericsError(NOT_FINITE)


def to_half(x: Tensor) -> Tensor:
    """Return `x` in float16.

    Raises:
        NumericsError: a number beyond float16.
    """
    if x.numel() and float(x.abs().max()) > MAX_F16:
        raise NumericsError(TOO_LARGE)
    return x.half()


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def encode_affine(x: Tensor, bits: int, symmetric: bool = False, inlier: Tensor | None = None) -> Groups:
    """Return round-to-nearest codes of groups x (..., g).

    Asymmetric: zero = min, scale = (max - min) / (2^bits - 1). Symmetric: scale = max|x| / (2^(bits-1) - 1), codes
    stand 2^(bits-1) above their number. A constant group has scale 0 and codes 0: it is read as its zero.

    Args:
        x: (..., g) groups of numbers.
        bits: Bits of a code.
        symmetric: Store no zero.
        inlier: (..., g) bool, numbers that decide the range; None for all.

    Raises:
        NumericsError: NaN, infinity, or a number beyond float16.
    """
    check_finite(x)
    x = x.float()
    low, high = _range(x, inlier)
    if symmetric:
        half = 1 << (bits - 1)
        scale = to_half(torch.maximum(high, -low) / (half - 1))
        codes = torch.round(x * inverse(scale.float())[..., None]).clamp(1 - half, half - 1) + half
        return Groups(codes.long(), scale, None)
    max_code = (1 << bits) - 1
    zero, scale = to_half(low), to_half((high - low) / max_code)
    codes = torch.round((x - zero.float()[..., None]) * inverse(scale.float())[..., None]).clamp(0, max_code)
    return Groups(codes.long(), scale, zero)


def decode_affine(groups: Groups, bits: int) -> Tensor:
    """Return the numbers (..., g) float32 that the codes stand for."""
    scale = groups.scales.float()[..., None]
    if groups.zeros is None:
        return (groups.codes - (1 << (bits - 1))) * scale
    return groups.codes * scale + groups.zeros.float()[..., None]


def _range(x: Tensor, inlier: Tensor | None) -> tuple[Tensor, Tensor]:
    if inlier is None:
        return x.amin(-1), x.amax(-1)
    low = torch.where(inlier, x, torch.inf).amin(-1)
    high = torch.where(inlier, x, -torch.inf).amax(-1)
    none = ~inlier.any(-1)
    return torch.where(none, 0.0, low), torch.where(none, 0.0, high)


def between(y: Tensor, cuts: Tensor) -> Tensor:
    """Return the code (...) int64 of y: how many of the ascending cuts are below it."""
    return torch.bucketize(y.contiguous(), cuts)


def encode_table(x: Tensor, cuts: Tensor, inlier: Tensor | None = None) -> Groups:
    """Return codes of groups x (..., g) with their range mapped to [-1, 1] (KVQuant).

    zero = middle, scale = half the range.

    Raises:
        NumericsError: NaN, infinity, or a number beyond float16.
    """
    check_finite(x)
    x = x.float()
    low, high = _range(x, inlier)
    zero, scale = to_half((high + low) / 2), to_half((high - low) / 2)
    y = (x - zero.float()[..., None]) * inverse(scale.float())[..., None]
    return Groups(between(y, cuts), scale, zero)


def decode_table(groups: Groups, table: Tensor) -> Tensor:
    """Return the numbers (..., g) float32 that the codes stand for."""
    assert groups.zeros is not None
    return table[groups.codes] * groups.scales.float()[..., None] + groups.zeros.float()[..., None]


def encode_e4m3(x: Tensor) -> Groups:
    """Return codes 0 to 255 of x (..., g) with one float32 scale per group.

    Its largest number is the largest code. Nothing is ever clipped: the scale follows the numbers.

    Raises:
        NumericsError: NaN or infinity.
    """
    check_finite(x)
    x = x.float()
    scale = x.abs().amax(-1) / MAX_E4M3
    scaled = (x * inverse(scale)[..., None]).clamp(-MAX_E4M3, MAX_E4M3)
    return Groups(scaled.to(torch.float8_e4m3fn).view(torch.uint8).long(), scale, None)


def decode_e4m3(groups: Groups) -> Tensor:
    """Return the numbers (..., g) float32 that the codes stand for."""
    return groups.codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * groups.scales[..., None]
