"""The packed part of the regions of one layer.

A region has two parts: entries in plain pages (sinks, the residual window, whatever is newest) and sealed ones in
packed pages. Either may be empty. Codes are written once and read until their page is freed. A packed entry that is
evicted leaves a *tombstone*: position -1 in its slot, which attention and scores skip from then on; the `dead` of
`PackedRegions` counts them. A page is freed when all its slots are dead. Where a group spans several slots
(`layout.grain` > 1) the survivors of different groups cannot share scales without being encoded again, so they stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.packed.arrays import PackedArrays
from millpond.kernels.packed.rope import Rope


@dataclass(frozen=True, slots=True)
class PackedRegions:
    """What R regions of one layer hold in packed pages; twin of `PageRegions`.

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
            all positions. Scales of such keys are one per channel: `fixed`, or of the slots of a group.
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

    def check(self, n_regions: int, key_dim: int) -> None:
        """
        Raises:
            OptionError: these are not the packed part of `n_regions` regions with plain keys of `key_dim` channels.
        """
        beside = n_regions, key_dim
        if self.known.get("fits") == beside:
            return
        self.check_stored(n_regions)
        layout = self.pages.layout
        if self.channels is None and layout.key_dim != key_dim:
            raise OptionError(
                f"packed keys of {layout.key_dim} channels for plain ones of {key_dim}; name the kept ones in "
                "`channels`"
            )
        self.known["fits"] = beside

    def check_stored(self, n_regions: int) -> None:
        """
        Raises:
            OptionError: not as many regions, or not what the layout needs.
        """
        layout = self.pages.layout
        if self.table.shape[0] != n_regions:
            raise OptionError(f"{self.table.shape[0]} packed regions for {n_regions} plain ones")
        if self.rope is not None and not (layout.key.per_channel and self.channels is None and self.balance is None):
            raise OptionError("keys are stored before RoPE with scales per channel only, in all channels, unbalanced")
        for given in (self.key_scales, self.key_zeros):
            if layout.key.fixed != (given is not None):
                need = "needs" if layout.key.fixed else "takes no"
                raise OptionError(f"this layout {need} calibrated key_scales and key_zeros in PackedRegions")

    def part(self, rows: slice | npt.NDArray[np.int64]) -> PackedRegions:
        """Some of the regions: whole sequences, where scales are calibrated; copies, of any but neighbours."""
        at = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.table.device)
        channels, balance = (None if t is None else t[at] for t in (self.channels, self.balance))
        table, lens, dead = self.table[at], self.lens[at], self.dead[at]
        return replace(self, table=table, lens=lens, dead=dead, channels=channels, balance=balance)
