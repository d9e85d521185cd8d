"""Entries of some tokens as numbers of the codec `transform`, and back: RoPE is undone, and done again."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.types import RotaryEmbedding
from millpond.codec.transform.coding import decode, project
from millpond.codec.transform.page import TOKENS, PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, Sides

#: Positions of some tokens: that of the first of neighbours, or those of all, (n,) int64.
Positions = int | Tensor


def projected(
    sides: Sides, keys: Tensor, values: Tensor, positions: Positions, rotary: RotaryEmbedding | None
) -> tuple[Tensor, Tensor]:
    """Return z of the keys and of the values of some tokens.

    It is (n, r) float32 each, on the CPU.

    Args:
        sides: Transforms of the layer.
        keys: (H, n, D) after RoPE.
        values: (H, n, V).
        positions: Positions of the tokens.
        rotary: Rotation of the keys; None if they have none.
    """
    key, value = (side.to(keys.device) for side in sides)
    of_keys, of_values = before_rope(keys, values, positions, rotary)
    return project(key, of_keys).cpu(), project(value, of_values).cpu()


def before_rope(
    keys: Tensor, values: Tensor, positions: Positions, rotary: RotaryEmbedding | None
) -> tuple[Tensor, Tensor]:
    """Return keys without their rotation, and values, all KV heads of a token side by side.

    They are (n, H D) float32 and (n, H V) of the type of values.

    Args:
        keys: (H, n, D) after RoPE.
        values: (H, n, V).
        positions: Positions of the tokens.
        rotary: Rotation of the keys; None if they have none.
    """
    if rotary is not None and keys.shape[1]:
        keys = rotary.rotate(keys[None], _all_of(positions, keys)[None], inverse=True)[0]
    return joined(keys.float()), joined(values)


def decoded(
    sides: Sides,
    header: LayerHeader,
    pages: Tensor,
    address: PageAddress,
    shape: tuple[int, int, int],
    positions: Positions,
    rotary: RotaryEmbedding | None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens of pages: keys (H, n, D) after RoPE and values (H, n, V), float32.

    Args:
        sides: Transforms of the layer, on the device that computes.
        header: Means, scales and bits that the pages were written with, there too.
        pages: (P, bytes) uint8; n is 32 P.
        address: Where they belong.
        shape: H, D and V.
        positions: Positions of the tokens.
        rotary: Rotation of the keys; None if they have none.

    Raises:
        DataError: a page has another size, is damaged, or belongs elsewhere.
    """
    heads, *dims = shape
    n = len(pages) * TOKENS
    keys, values = (
        side.view(n, heads, dim).transpose(0, 1)
        for side, dim in zip(decode(sides, header, pages, address), dims, strict=True)
    )
    if rotary is not None and n:
        keys = rotary.rotate(keys[None], _all_of(positions, keys)[None])[0]
    return keys, values


def moments(z: Tensor, coded: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of z (n, r) over the tokens that are `coded` (n,).

    They are 0 and 1 if there are none.
    """
    if not coded.any():
        return z.new_zeros(z.shape[1]), z.new_ones(z.shape[1])
    others, n = (~coded).nonzero()[:, 0], int(coded.sum())
    x = z.T.clone().index_fill_(1, others, 0)  # by dimension, as kernels write it
    mean = (x.sum(1, dtype=torch.float64) / n).float()
    squares = x.sub_(mean[:, None]).index_fill_(1, others, 0).square_()
    return mean, (squares.sum(1, dtype=torch.float64) / n).sqrt().float()


def _all_of(positions: Positions, keys: Tensor) -> Tensor:
    """Return the positions (n,) of keys (H, n, D), on their device."""
    if isinstance(positions, Tensor):
        return positions.to(keys.device)
    return torch.arange(positions, positions + keys.shape[1], device=keys.device)


def joined(x: Tensor) -> Tensor:
    """Return entries (H, n, D) of all heads of a token side by side, (n, H D)."""
    return x.transpose(0, 1).flatten(1)
