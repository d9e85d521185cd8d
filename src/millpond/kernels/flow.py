"""Values that are passed on: entries leave one after another, and each gives to those right behind it."""

from __future__ import annotations

import torch
from torch import Tensor

#: Columns that are solved together.
BLOCK = 64


def flow(x: Tensor, share: Tensor, reach: Tensor) -> Tensor:
    """y_j = x_j + sum of share_i * y_i over the columns i before j with j - i <= reach_i.

    What a column gives includes what it was given, as when columns leave in their order.

    Args:
        x: (R, N, D) float. share: (R, N), what a column gives to each one in reach; 0: it gives nothing. reach: (R, N) int64.

    Returns:
        (R, N, D) in the dtype of `x`. What nothing is given to is as it was.
    """
    y, share = x.clone(), share.to(x.dtype)
    n, most = x.shape[1], int(reach.amax())
    columns = torch.arange(n, device=x.device)
    for begin in range(0, n, BLOCK):
        end, first = min(begin + BLOCK, n), max(0, begin - most)
        behind = columns[begin:end, None] - columns[first:end]
        given = torch.where((behind > 0) & (behind <= reach[:, None, first:end]), share[:, None, first:end], 0)
        taken = y[:, begin:end] + given[..., : begin - first] @ y[:, first:begin]
        inside = torch.eye(end - begin, device=x.device, dtype=x.dtype) - given[..., begin - first :]
        y[:, begin:end] = torch.linalg.solve_triangular(inside, taken, upper=False, unitriangular=True)
    return y
