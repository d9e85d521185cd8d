"""Pairwise products of entries in plain torch: see `ops.absolute_sums` and `ops.newest_alike`."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.eager.softmax import wide

#: Rows of a matrix of cosines that are held at a time.
ROWS = 256


def absolute_sums(x: Tensor, y: Tensor) -> Tensor:
    dtype, sets = wide(x.dtype), len(y) // max(len(x), 1)
    sums = [
        sum((own.to(dtype) @ other.to(dtype).T).abs().sum(-1) for other in y[h * sets : (h + 1) * sets])
        for h, own in enumerate(x)
    ]
    return torch.stack([torch.as_tensor(row) for row in sums]).float()


def newest_alike(keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    unit = torch.nn.functional.normalize(keys.to(wide(keys.dtype)), dim=-1)
    n = keys.shape[1]
    column = torch.arange(n, device=keys.device)
    there = column < lens[:, None]
    at = torch.full((*keys.shape[:2], most), -1, dtype=torch.int32, device=keys.device)
    cosines = torch.zeros(at.shape, dtype=unit.dtype, device=keys.device)
    for begin in range(0, n, ROWS):
        rows = slice(begin, begin + ROWS)
        cosine = unit[:, rows] @ unit.transpose(1, 2)
        alike = (cosine > threshold) & there[:, None] & there[:, rows, None] & (column != column[rows, None])
        last = torch.where(alike, column, -1).topk(min(most, n), -1).values
        found = cosine.gather(2, last.clamp(min=0))
        at[:, rows, :n], cosines[:, rows, :n] = last.int(), torch.where(last >= 0, found, 0)
    return at, cosines
