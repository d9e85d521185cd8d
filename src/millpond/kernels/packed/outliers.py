"""Entries beside the codes: the numbers of a page that its scales would serve worst, kept exactly.

Dense and sparse storage of KVQuant (Hooper et al., NeurIPS 2024, arXiv:2401.18079). There a fixed share of the vector
of a token is kept; here it is a fixed share of a page, so that a page of one head stands alone and has a fixed size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.packed.layout import MOST_NAMED, Side, groups_of
from millpond.kernels.packed.tiles import split


def inliers(x: Tensor, side: Side, fixed: tuple[Tensor, Tensor] | None) -> Tensor:
    """(P, slots, dim) bool: all but the `side.n_extra` numbers of each page that lie farthest out.

    How far is measured from the middle of the calibrated range of the channel, in units of it, or else from the mean
    of the number's group, in standard deviations.
    """
    if fixed is not None:
        scale, zero = fixed
        middle = zero if side.format.uses_table else zero + scale * ((1 << side.format.bits) - 1) / 2
        far = ((x - middle) / scale.clamp(min=torch.finfo(torch.float32).tiny)).abs()
    else:
        grouped = split(x, 1, side.group) if side.by_channel else split(x, 2, x.shape[2] // groups_of(side, x.shape[2]))
        axis = 2 if side.by_channel else 3
        away = (grouped - grouped.mean(axis, keepdim=True)).abs()
        spread = away.square().mean(axis, keepdim=True).sqrt()
        far = (away / spread.clamp(min=torch.finfo(torch.float32).tiny)).reshape(x.shape)
    found = far.flatten(1).topk(side.n_extra, 1).indices
    return torch.ones_like(far, dtype=torch.bool).flatten(1).scatter(1, found, False).view_as(far)


def beside(rest: Tensor, inlier: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(where, what) (P, n): the places of the n outliers of each page, ascending, and what their codes lack."""
    places = (~inlier).flatten(1).nonzero()[:, 1].view(rest.shape[0], n)
    slot, channel = places // rest.shape[2], places % rest.shape[2]
    return slot * MOST_NAMED + channel, rest.flatten(1).gather(1, places).half()


def add(x: Tensor, where: Tensor, what: Tensor) -> Tensor:
    """X (P, slots, dim) with the entries beside the codes added."""
    places = where // MOST_NAMED * x.shape[2] + where % MOST_NAMED
    return x.flatten(1).scatter_add(1, places, what.float()).view_as(x)
