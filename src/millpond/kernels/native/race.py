"""Draws of columns by their weights, on the CPU; see `kernels.race`."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from millpond.kernels.native.abi import entry_point
from millpond.kernels.thread_count import thread_count

#: the order of fields is that of csrc/common/args.hpp
RACE = Struct("=9q").pack


def race(weights: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Weights (R, C) float32, keys (R,) and ids (R, C) int64, all with contiguous rows -> the columns (R,) drawn."""
    keys = keys.contiguous()
    drawn = torch.empty(len(weights), dtype=torch.int64)
    entry_point("mp_race")(
        RACE(
            weights.data_ptr(),
            0 if ids is None else ids.data_ptr(),
            keys.data_ptr(),
            drawn.data_ptr(),
            *weights.shape,
            weights.stride(0),
            0 if ids is None else ids.stride(0),
            thread_count(),
        )
    )
    return drawn
