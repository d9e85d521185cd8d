"""A picture as a model's image side takes it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Numbers of one image after the model's image processor.

    Attributes:
        pixels: (channels, height, width), float.
        digest: SHA-256 of these numbers, their dtype and shape: equal images have equal digests, however they were
            sent.
    """

    pixels: Tensor = field(repr=False)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        pixels = self.pixels.detach().cpu().contiguous()
        hashed = hashlib.sha256(f"{pixels.dtype} {tuple(pixels.shape)} ".encode())
        hashed.update(pixels.view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "pixels", pixels)
        object.__setattr__(self, "digest", hashed.digest())
