"""A layer of the codec `transform` with numbers that are the same everywhere, and one side's tokens in float64."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from millpond.codec.transform.fit import SideTransform
from millpond.codec.transform.page import PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, Sides

AT = PageAddress(0xA1B2C3D4, 5, 2)


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers within 4 of 0 that float32 has; NumPy keeps the stream of this generator."""
    whole = np.random.RandomState(seed).randint(-(1 << 20), 1 << 20, shape)
    return torch.from_numpy(whole / float(1 << 18)).float()


def side_of(rows: int, d: int, seed: int) -> SideTransform:
    levels = tuple(drawn(1 << bits, seed=seed + bits).sort().values for bits in range(1, 8))
    mean, forward, back = drawn(d, seed=seed + 10), drawn(rows, d, seed=seed + 11), drawn(rows, d, seed=seed + 12)
    return SideTransform(mean, forward.bfloat16().float() / 4, back.bfloat16().float() / 4, torch.ones(rows, 8), levels)


def layer_of(key: tuple[int, int] = (70, 83), value: tuple[int, int] = (37, 48), seed: int = 0) -> Sides:
    """Rows and channels of keys and values."""
    return side_of(*key, seed), side_of(*value, seed + 100)


def header_of(layer: Sides, seed: int = 0, plain: bool = False) -> LayerHeader:
    """Half of the dimensions have no bits; the others have 1 to 7."""
    parts = []
    for nth, side in enumerate(layer):
        random = np.random.RandomState(seed + nth)
        bits = torch.from_numpy(np.maximum(random.randint(-7, 8, side.n_rows), 0).astype(np.uint8))
        mean = drawn(side.n_rows, seed=seed + nth + 50).half().float()
        scale = drawn(side.n_rows, seed=seed + nth + 60).abs().half().float() + 0.125
        if plain:
            mean, scale = torch.zeros_like(mean), torch.ones_like(scale)
        parts.append(SideHeader(mean, scale, bits))
    return LayerHeader(*parts)


def turned(layer: Sides, header: LayerHeader) -> tuple[Sides, LayerHeader]:
    """The same codec with its dimensions in the opposite order."""
    sides = [
        SideTransform(side.mean, side.rows.flip(0), side.columns.flip(0), side.distortions.flip(0), side.levels)
        for side in layer
    ]
    parts = [SideHeader(part.mean.flip(0), part.scale.flip(0), part.bits.flip(0)) for part in header]
    return (sides[0], sides[1]), LayerHeader(*parts)


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
