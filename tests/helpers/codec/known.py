"""A calibration of random keys and values, and a rotation, for layers without a model."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from millpond.codec import Codec
from millpond.codec.calibration import Calibration, LayerCalibration, Numbers
from millpond.codec.nuq import as_table, kmeans, normalised_keys, normalised_token_values, normalised_values


class HalfRotation:
    """Turns channel c with channel c + D / 2, as Llama does."""

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None, :, None] * 100.0 ** (-torch.arange(half, device=x.device) / half)
        cos, sin = angles.cos(), -angles.sin() if inverse else angles.sin()
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@cache
def calibration(n_kv_heads: int, dim: int, layers: int = 1, bits: tuple[int, ...] = (2, 3, 4)) -> Calibration:
    """Of keys with one large channel, as `layers.tokens` makes them after RoPE."""
    g = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, 32 * 32, n_kv_heads, dim, generator=g)
    k[..., 3] = 6 * k[..., 3] + 4
    at = torch.arange(len(k))[None]
    k = HalfRotation().rotate(k.transpose(0, 1)[None], at, inverse=True)[0].transpose(0, 1)
    y, w, scale, zero = normalised_keys(k.flatten(1), None)
    y_v, w_v = normalised_values(v.transpose(0, 1).reshape(-1, 32, dim), None, round(0.01 * 32 * dim))
    y_t, w_t = normalised_token_values(v.flatten(1), None, 0.01)
    shape = (n_kv_heads, dim)
    layer = LayerCalibration(
        scale.view(shape),
        zero.view(shape),
        {b: Numbers(as_table(kmeans(y, w, 1 << b))) for b in bits},
        {b: Numbers(as_table(kmeans(y_v, w_v, 1 << b))) for b in bits},
        {b: Numbers(as_table(kmeans(y_t, w_t, 1 << b))) for b in bits},
    )
    return Calibration((layer,) * layers, "none", "random")


def known(codec: Codec, n_kv_heads: int, dim: int) -> Codec:
    """The codec with a calibration, where it needs one."""
    return calibration(n_kv_heads, dim).applied(codec) if codec.calibrated else codec
