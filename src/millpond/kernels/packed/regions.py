"""The packed part of the regions of one layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
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
        known: what an implementation has found out about these regions, so that it need not at every step. Of an
            object whose tensors others put in place nothing is known.
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
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def part(self, rows: slice | npt.NDArray[np.int64]) -> PackedRegions:
        """Some of the regions: whole sequences, where scales are calibrated; copies, of any but neighbours."""
        at = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.table.device)
        channels, balance = (None if t is None else t[at] for t in (self.channels, self.balance))
        table, lens, dead = self.table[at], self.lens[at], self.dead[at]
        return replace(self, table=table, lens=lens, dead=dead, channels=channels, balance=balance)
