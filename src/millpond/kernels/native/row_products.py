"""Calls of native products between rows: sums of their sizes, and the newest similar keys."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from millpond.kernels.native.structs import DTYPES, INT32, flat_indices, readable_rows, run
from millpond.kernels.thread_count import thread_count

SCAN = Struct("=21qd").pack
#: Columns that `mp_newest_alike` reads together.
COLUMNS = 128


def _scan_struct(x: Tensor, y: Tensor, sets: int, results: tuple[int, ...], threshold: float = 0.0) -> bytes:
    """Return the C struct of products of rows x (H, N, dim) and y (H * sets, n, dim)."""
    rows = (x.data_ptr(), y.data_ptr(), DTYPES[x.dtype], DTYPES[y.dtype], *x.stride()[:2], *y.stride()[:2])
    return SCAN(*rows, *x.shape[:2], sets, y.shape[1], x.shape[2], *results, thread_count(), threshold)


def absolute_sums(x: Tensor, y: Tensor) -> Tensor:
    """Return (H, N) for x (H, N, dim) and y (H * sets, n, dim)."""
    x, y = readable_rows(x), readable_rows(y)
    n_heads, n_rows, _ = x.shape
    sums = torch.zeros((n_heads, n_rows), dtype=torch.float32)
    if x.numel() and y.numel():
        results = (sums.data_ptr(), 0, 0, 0, 0, 0, 0)
        run("mp_absolute_sums", "the products", _scan_struct(x, y, len(y) // n_heads, results))
    return sums


def newest_alike(keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """Return (H, N, most) int32 and float32 for keys (H, N, dim) and lens (H,)."""
    keys, lens = readable_rows(keys), flat_indices(lens).contiguous()
    n_heads, n_rows, _ = keys.shape
    at = torch.full((n_heads, n_rows, most), -1, dtype=INT32)
    cosines = torch.zeros((n_heads, n_rows, most), dtype=torch.float32)
    if keys.numel() and most:
        scales = torch.zeros((n_heads, -(-n_rows // COLUMNS) * COLUMNS), dtype=torch.float32)
        lengths = torch.linalg.vector_norm(keys.float(), dim=-1)
        torch.reciprocal(lengths.clamp_(min=1e-12), out=scales[:, :n_rows])
        to = (lens.data_ptr(), at.data_ptr(), cosines.data_ptr(), most)
        struct = _scan_struct(keys, keys, 1, (0, scales.data_ptr(), scales.stride(0), *to), threshold)
        run("mp_newest_alike", "the products", struct)
    return at, cosines
