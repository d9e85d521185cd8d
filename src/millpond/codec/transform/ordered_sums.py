"""Matrix product in float32 with one order of sums, so that every build and device computes equal bits."""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows of a tile: its sums stay in the second-level cache of a core.
TILE = 256


def ordered_product(x: Tensor, matrix: Tensor, start: Tensor | None = None) -> Tensor:
    """Return `start + x @ matrix`, every product and every sum rounded to float32 by itself.

    Column j of x times row j of the matrix is added to `start` for j = 0, 1, ... in turn; no product is fused with its
    sum. Results therefore do not depend on the tile, the number of threads, the build or the device.

    Args:
        x: (n, k).
        matrix: (k, m) float32.
        start: (m,) float32; None for zeros.

    Returns:
        (n, m) float32.
    """
    k, m = matrix.shape
    out = x.new_zeros((len(x), m), dtype=torch.float32)
    if start is not None:
        out += start
    tile = TILE if x.device.type == "cpu" else max(1, len(x))
    for begin in range(0, len(x), tile):
        columns = x[begin : begin + tile].float().T.contiguous()
        sums = out[begin : begin + tile]
        term = torch.empty_like(sums)
        for j in range(k):
            torch.mul(columns[j, :, None], matrix[j], out=term)
            sums += term
    return out
