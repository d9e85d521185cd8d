"""Bits of every dimension of a model: where one more bit lowers the distortion most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millpond.errors import OptionError

#: Fewest and most bits a number, the mean over all dimensions.
LEAST_BITS, MOST_MEAN_BITS = 0.5, 4.0


def check_bits(bits: float) -> float:
    """Return a mean number of bits.

    Raises:
        OptionError: out of range.
    """
    if not LEAST_BITS <= bits <= MOST_MEAN_BITS:
        raise OptionError(f"transform:{bits:g}: give {LEAST_BITS:g} to {MOST_MEAN_BITS:g} bits a number, such as 1.5")
    return bits


def allocate(distortions: Sequence[Tensor], total: int, tokens: Sequence[int] | None = None) -> list[Tensor]:
    """Return the bits of every dimension, `total` of them together.

    The drops D(b) - D(b + 1) of all dimensions, none larger than the one before it in its dimension, are taken in
    falling order; of equal ones the first dimension's.

    Args:
        distortions: For each side of each layer (rows, 1 + most bits) float32, in one unit.
        total: Bits to give; no more than all dimensions can take are given.
        tokens: How many tokens each part has: a bit of its dimensions counts as many of `total`. None: one each.

    Returns:
        For each part (rows,) uint8.
    """
    device = distortions[0].device
    together = torch.cat([part.cpu().double() for part in distortions])
    drops = (together[:, :-1] - together[:, 1:]).clamp(min=0).cummin(1).values
    order = drops.flatten().argsort(descending=True, stable=True)
    if tokens is None:
        order = order[: max(total, 0)]
    else:
        sizes = torch.tensor([len(part) for part in distortions])
        taken = torch.tensor(tokens).repeat_interleave(sizes)[order // drops.shape[1]].cumsum(0)
        order = order[: int((taken <= total).sum())]
    bits = torch.zeros(len(together), dtype=torch.int64)
    bits.index_add_(0, order // drops.shape[1], torch.ones_like(order))
    return [
        part.to(device=device, dtype=torch.uint8) for part in torch.split(bits, [len(part) for part in distortions])
    ]
