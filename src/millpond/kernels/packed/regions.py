"""The packed part of the regions of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.kernels.packed.arrays import PackedArrays
from millpond.kernels.packed.rope import Rope


@dataclass(frozen=True, slots=True)
class PackedRegions:
    """What the regions of one layer hold in packed pages; R regions, as in `ops`.

    Attributes:
        pages: the memory of the pool.
        table: (R, n) int32 page ids.
        lens: (R,) int32 slots in use, tombstones included.
        dead: (R,) int32 tombstones: slots in use whose position is -1. Written by `decode`.
        channels: (R, key_dim) int32: the channels of a key that are kept (ThinK), ascending; None: all.
        balance: (R, key_dim) float32: what a stored key is multiplied with to get the key, and the query with to meet
            it (the inverse of MiKV's balancer), over the kept channels; None: 1.
        key_scales, key_zeros: (Hkv, key_dim) float32, for keys whose scales are `fixed`.
        rope: keys are stored before RoPE, and turned by it to the positions of their slots when they are read; `write`
            takes them, and `read` and `decode` see them, after RoPE. None: they are stored as they are. It must know
            all positions.
    """

    pages: PackedArrays
    table: Tensor
    lens: Tensor
    dead: Tensor
    channels: Tensor | None = None
    balance: Tensor | None = None
    key_scales: Tensor | None = None
    key_zeros: Tensor | None = None
    rope: Rope | None = None
