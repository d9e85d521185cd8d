"""Outliers of a page: the numbers farthest from the range of their scales, stored exactly.

Dense and sparse storage of KVQuant (Hooper et al., NeurIPS 2024, arXiv:2401.18079). There a fixed share of the vector
of a token is kept; here it is a fixed share of a page, so that a page of one head stands alone and has a fixed size.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from millpond.kernels.packed.bit_tiles import split
from millpond.kernels.packed.groups import to_half
from millpond.kernels.packed.layout import LANES, MOST_NAMED, Side, groups_of


def inliers(x: Tensor, side: Side, fixed: tuple[Tensor, Tensor] | None) -> Tensor:
    """(P, slots, dim) bool: all but the `side.n_extra` numbers of each page that lie farthest out, the first of equals.

    How far is measured from the middle of the calibrated range of the channel, in units of it, or else from the mean
    of the number's group, in standard deviations.
    """
    tiny = torch.finfo(torch.float32).tiny
    if fixed is not None:
        scale, zero = fixed
        middle = zero if side.format.uses_table else zero + scale * ((1 << side.format.bits) - 1) / 2
        far = ((x - middle) / scale.clamp(min=tiny)).abs()
    else:
        grouped = split(x, 1, side.group) if side.by_channel else split(x, 2, x.shape[2] // groups_of(side, x.shape[2]))
        n = grouped.shape[2 if side.by_channel else 3]
        away = (grouped - _sum(grouped, side.by_channel) / n).abs()
        # by way of float64: torch's root of float32 is not always the nearest number
        spread = (_sum(away.square(), side.by_channel) / n).double().sqrt().float()
        far = (away / spread.clamp(min=tiny)).reshape(x.shape)
    found = far.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, : side.n_extra]
    return torch.ones_like(far, dtype=torch.bool).flatten(1).scatter(1, found, False).view_as(far)


def _sum(grouped: Tensor, by_channel: bool) -> Tensor:
    """Sums of groups in an order that native code repeats: slot after slot, (P, n, 1, dim) of (P, n, slots, dim); or 16
    channels after 16 and then half onto half, (P, slots, n, 1) of (P, slots, n, channels)."""
    if by_channel:
        return reduce(torch.add, grouped.unbind(2)).unsqueeze(2)
    lanes = reduce(torch.add, split(grouped, 3, LANES).unbind(3))
    while lanes.shape[3] > 1:
        half = lanes.shape[3] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes


def beside(rest: Tensor, inlier: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(where, what) (P, n): the places of the n outliers of each page, ascending, and what their codes lack.

    Raises:
        NumericsError: one lacks more than float16 holds.
    """
    places = (~inlier).flatten(1).nonzero()[:, 1].view(rest.shape[0], n)
    slot, channel = places // rest.shape[2], places % rest.shape[2]
    return slot * MOST_NAMED + channel, to_half(rest.flatten(1).gather(1, places))


def add(x: Tensor, where: Tensor, what: Tensor) -> Tensor:
    """X (P, slots, dim) with the outliers added."""
    places = where // MOST_NAMED * x.shape[2] + where % MOST_NAMED
    return x.flatten(1).scatter_add(1, places, what.float()).view_as(x)
