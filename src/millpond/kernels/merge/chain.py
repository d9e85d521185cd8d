"""Chained merging: entries are evicted one after another, each into the entries that follow it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: Columns that are solved together, unless a column reaches further.
BLOCK = 32


def chain(x: Tensor, share: Tensor, reach: Tensor) -> Tensor:
    """y_j = x_j + sum of share_i * y_i over the columns i before j with j - i <= reach_i.

    What a column gives includes what it was given, as when columns leave in their order.

    Args:
        x: (R, N, D) float. reach: (R, N) int64.
        share: (R, N), what a column gives to each one in reach; 0: it gives nothing.

    Returns:
        (R, N, D) in the dtype of `x`. Entries that receive nothing are unchanged.
    """
    n_regions, n, dim = x.shape
    most = int(reach.amax())
    size = max(BLOCK, most)  # so that a block gives to itself and to the next one alone
    pad = -n % size
    share, reach = (F.pad(part, (0, pad)).view(n_regions, -1, 1, size) for part in (share.to(x.dtype), reach))
    column = torch.arange(size, device=x.device)
    behind = column[:, None] - column
    inside = torch.where((behind > 0) & (behind <= reach), -share, 0).transpose(0, 1).contiguous()
    across = torch.where(behind + size <= reach, share, 0)[..., size - most :].transpose(0, 1).contiguous()
    y = F.pad(x, (0, 0, 0, pad)).view(n_regions, -1, size, dim).transpose(0, 1).contiguous()
    for block in range(len(y)):
        if block:
            y[block].baddbmm_(across[block - 1], y[block - 1, :, size - most :])
        y[block] = torch.linalg.solve_triangular(inside[block], y[block], upper=False, unitriangular=True)
    return y.transpose(0, 1).reshape(n_regions, n + pad, dim)[:, :n]
