"""Long eviction at every step: what is quantized again as pages empty, where scales stay and where they move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.codec.layers import decode, feed, make, parts, tokens

FIRST, LAST = 240, 700


def error(found: Tensor, positions: Tensor, quantized: Tensor, keys: Tensor) -> float:
    """Of the quantized keys of the first tokens."""
    chosen = (positions >= 0) & (positions < FIRST) & torch.isin(positions, quantized)
    exact = keys[positions[chosen].long()]
    return float((found[chosen] - exact).norm() / exact.norm())


@pytest.mark.parametrize(("codec", "most"), [("rotated2_paper", 1.03), ("kvquant2", 1.15), ("kvquant4", 1.15)])
def test_formats_whose_scales_stay_do_not_drift(codec: str, most: float) -> None:
    cache, qkv = make(codec, "random", 256), tokens(LAST)
    feed(cache, qkv, 0, FIRST)
    errors = []
    for _ in range(2):
        row, quantized = cache.read(0), parts(cache)[1].positions(slice(0, 1))[0]
        errors.append(error(row.keys[0], row.positions[0], quantized[quantized >= 0], qkv[1][0, 0]))
        if cache.columns == FIRST:
            decode(cache, qkv, FIRST, LAST)
    assert errors[0] > 0
    assert errors[1] < most * errors[0]
