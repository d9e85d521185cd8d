"""Header of a text: mean, scale and bits of every dimension in all layers, fitted to its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.codec.transform.allocation import allocate, check_bits
from millpond.codec.transform.fit import SideTransform
from millpond.codec.transform.levels import MOST_BITS
from millpond.errors import DataError

#: Smallest and largest scale of a dimension, relative to its deviation in the calibration.
LEAST_SCALE, MOST_SCALE = 2.0**-10, 2.0**12


@dataclass(frozen=True, slots=True, eq=False)
class SideHeader:
    """Mean, scale and bits of the dimensions of one side of a layer.

    Attributes:
        mean: (r,) float32, a number of float16.
        scale: (r,) float32, a number of float16.
        bits: (r,) uint8, 0 to 7.
    """

    mean: Tensor
    scale: Tensor
    bits: Tensor

    def to_bytes(self) -> Tensor:
        """Return means, scales, and the bits, two dimensions to a byte with the low half first."""
        halves = torch.stack([self.mean, self.scale]).cpu().half()
        odd = torch.nn.functional.pad(self.bits.cpu(), (0, len(self.bits) % 2)).view(-1, 2)
        return torch.cat([halves.view(torch.uint8).flatten(), odd[:, 0] | (odd[:, 1] << 4)])

    @classmethod
    def from_bytes(cls, data: Tensor, rows: int, device: torch.device) -> SideHeader:
        """Read what `to_bytes` returned of `rows` dimensions.

        Raises:
            DataError: another length, numbers that are not finite, or bits out of range.
        """
        if data.dtype != torch.uint8 or data.shape != (header_bytes(rows),):
            raise DataError(f"a header of {rows} dimensions has {header_bytes(rows)} bytes, not {tuple(data.shape)}")
        mean, scale = data[: 4 * rows].clone().view(torch.float16).float().view(2, rows)
        pairs = data[4 * rows :]
        bits = torch.stack([pairs & 15, pairs >> 4], 1).flatten()[:rows]
        right = mean.isfinite().all() and ((scale >= LEAST_SCALE) & (scale <= MOST_SCALE)).all()
        if not bool(right and (bits <= MOST_BITS).all()):
            raise DataError("a header has numbers that no text gives; save the text again")
        return cls(mean.to(device), scale.to(device), bits.to(device))


def header_bytes(rows: int) -> int:
    """Return the bytes of the header of one side with `rows` dimensions."""
    return 4 * rows + (rows + 1) // 2


class LayerHeader(NamedTuple):
    """Headers of a layer's keys and values."""

    key: SideHeader
    value: SideHeader

    @property
    def bits(self) -> Tensor:
        """Bits of all dimensions, keys before values."""
        return torch.cat([self.key.bits, self.value.bits])


#: Keys and values of a layer.
Sides = tuple[SideTransform, SideTransform]


def plain_headers(layers: Sequence[Sides], bits: float) -> list[LayerHeader]:
    """Return headers without a text: means 0, scales 1, and the bits of the calibration.

    Raises:
        OptionError: bits out of range.
    """
    parts = [side for layer in layers for side in layer]
    given = allocate([side.distortions for side in parts], total_bits(layers, bits))
    headers = [
        SideHeader(torch.zeros(side.n_rows), torch.ones(side.n_rows), width)
        for side, width in zip(parts, given, strict=True)
    ]
    return [LayerHeader(key, value) for key, value in zip(headers[::2], headers[1::2], strict=True)]


def adapted_headers(
    layers: Sequence[Sides], moments: Sequence[tuple[Tensor, Tensor]], bits: float, tokens: Sequence[int] | None = None
) -> list[LayerHeader]:
    """Return headers fitted to a text: its means, its scales, and bits that follow from them.

    Args:
        layers: Transforms of the layers, or of parts of them.
        moments: Mean and deviation (r,) float32 of z over the coded tokens, for each side of each layer in turn.
        bits: Mean bits a number, over the numbers of all tokens.
        tokens: Tokens of each layer; None if all have as many.

    Raises:
        OptionError: bits out of range.
    """
    parts = [side for layer in layers for side in layer]
    means = [_halves(mean, -MOST_SCALE, MOST_SCALE) for mean, _ in moments]
    scales = [_halves(scale, LEAST_SCALE, MOST_SCALE) for _, scale in moments]
    weighed = [side.distortions * scale.square()[:, None] for side, scale in zip(parts, scales, strict=True)]
    if tokens is None:
        given = allocate(weighed, total_bits(layers, bits))
    else:
        total = sum(n * sum(len(side.mean) for side in layer) for n, layer in zip(tokens, layers, strict=True))
        given = allocate(weighed, int(check_bits(bits) * total), [n for n in tokens for _ in range(2)])
    headers = [SideHeader(*numbers) for numbers in zip(means, scales, given, strict=True)]
    return [LayerHeader(key, value) for key, value in zip(headers[::2], headers[1::2], strict=True)]


def total_bits(layers: Sequence[Sides], bits: float) -> int:
    """Return the bits of a token in all layers, at a mean of `bits` a number.

    Raises:
        OptionError: bits out of range.
    """
    return int(check_bits(bits) * sum(len(side.mean) for layer in layers for side in layer))


def _halves(x: Tensor, low: float, high: float) -> Tensor:
    """Return numbers within bounds as those of float16."""
    return x.float().clamp(low, high).half().float()
