"""Packed part of the regions of one layer, with RoPE applied at reading (KVQuant, arXiv:2401.18079)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.packed.layout import RUN, PackedArrays

#: Turns keys (1, 1, n, D) from position 0 to `positions` (1, n).
Turn = Callable[[Tensor, Tensor], Tensor]
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the keys of one layer.

    Attributes:
        pairs: (n, 2) int32: channels (a, b) that turn together: a' = a cos - b sin, b' = b cos + a sin. Channels in no
            pair stay as they are.
        cos: (positions, n) float32.
        sin: (positions, n) float32.
        near_cos: (n, 32) float32, cosines of the first 32 positions, without the scale.
        near_sin: (n, 32) float32, sines of the first 32 positions, without the scale.
        by_channel: (3, D) int32: of each channel c its partner, its pair, and the sign s for which the dot product of a
            query q with a key k turned to a position is the sum over c of k[c] (q[c] cos + s q[partner] sin); -1, 0, 0
            for a channel that no pair names.
    """

    pairs: Tensor
    cos: Tensor
    sin: Tensor
    near_cos: Tensor
    near_sin: Tensor
    by_channel: Tensor

    @classmethod
    def of(cls, turn: Turn, dim: int, positions: int, device: torch.device = HOST) -> Rope:
        """Return tables of a rotation of keys of `dim` channels for `positions` positions or more."""
        pairs = pairs_of(turn, dim, device)
        a, b = pairs.long().unbind(1)
        first = torch.zeros(1, 1, 1, dim, device=device).index_fill(3, a, 1.0)
        at = torch.arange(max(positions, RUN), device=device)[None]
        turned = turn(first.expand(1, 1, at.shape[1], dim), at)[0, 0].float()
        cos, sin = turned[:, a].contiguous(), turned[:, b].contiguous()
        scale = (cos[:RUN].square() + sin[:RUN].square()).sqrt()
        near_cos, near_sin = ((t[:RUN] / scale).T.contiguous() for t in (cos, sin))
        return cls(pairs, cos, sin, near_cos, near_sin, _by_channel(pairs.cpu(), dim).to(device))

    @property
    def positions(self) -> int:
        """Number of positions of the tables."""
        return self.cos.shape[0]

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys (..., n, D) float32 rotated to positions (..., n).

        Those at -1 become 0.
        """
        return self._turned(keys, positions, inverse=False)

    def turn_back(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys (..., n, D) float32 at positions (..., n) as they were before RoPE."""
        return self._turned(keys, positions, inverse=True)

    def _turned(self, keys: Tensor, positions: Tensor, *, inverse: bool) -> Tensor:
        at = positions.long().clamp(min=0)
        cos, sin = self.cos[at], self.sin[at]
        if inverse:
            norm = cos.square() + sin.square()
            cos, sin = cos / norm, -sin / norm
        first, second = self.pairs.long().unbind(1)
        a, b = keys[..., first], keys[..., second]
        out = keys.clone()
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out


def pairs_of(turn: Turn, dim: int, device: torch.device) -> Tensor:
    """Return pairs of channels that turn together, (n, 2) int32.

    They are found by turning each channel alone; the lower one comes first.
    """
    alone = torch.eye(dim, device=device)[None, None]
    turned = turn(alone, torch.ones(1, dim, dtype=torch.int64, device=device))[0, 0].float().cpu()
    mixed = turned.fill_diagonal_(0.0).abs()
    partner = mixed.argmax(1)
    first = [c for c in range(dim) if float(mixed[c, partner[c]]) > 0 and c < int(partner[c])]
    return torch.tensor([[c, int(partner[c])] for c in first], dtype=torch.int32).reshape(-1, 2).to(device)


def _by_channel(pairs: Tensor, dim: int) -> Tensor:
    """Return `Rope.by_channel` of pairs (n, 2), on the host."""
    out = torch.tensor([[-1], [0], [0]], dtype=torch.int32).repeat(1, dim)
    numbers = torch.arange(len(pairs), dtype=torch.int32)
    for own, other, sign in ((0, 1, 1), (1, 0, -1)):
        at = pairs[:, own].long()
        out[0, at], out[1, at], out[2, at] = pairs[:, other], numbers, sign
    return out


@dataclass(frozen=True, slots=True)
class PackedRegions:
    """Packed pages of R regions of one layer; twin of `PageRegions`.

    Attributes:
        pages: Memory of the pool.
        table: (R, n) int32 page ids.
        lens: (R,) int32 slots in use, tombstones included.
        dead: (R,) int32 tombstones: slots in use whose position is -1. Written by `decode`.
        channels: (R, key_dim) int32, ascending channels of a key that are kept (ThinK); None for all.
        balance: (R, key_dim) float32, factor that restores a stored key, and that multiplies the query instead (the
            inverse of MiKV's balancer), over the kept channels; None for 1.
        value_channels: (R, value_dim) int32, ascending channels of a value that are kept (ThinK); None for all.
        whole_value_dim: Channels of a value before any are dropped; 0 for as many as are stored.
        key_scales: (Hkv, key_dim) float32, for keys whose scales are `fixed`.
        key_zeros: (Hkv, key_dim) float32, likewise.
        rope: Keys are stored before RoPE, and turned by it to the positions of their slots when they are read; `write`
            takes them, and `read` and `decode` see them, after RoPE. None: they are stored as they are. It must know
            all positions. Scales of such keys are one per channel: `fixed`, or of the slots of a group.
        known: Facts about these regions that an implementation has computed, to be reused at later steps. A copy with
            other tensors starts without any.
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
    value_channels: Tensor | None = None
    whole_value_dim: int = 0
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def knows_regions(self) -> bool:
        """Whether there is more about each region than its pages: the channels that it keeps, or their factors."""
        return any(t is not None for t in (self.channels, self.balance, self.value_channels))

    def check(self, n_regions: int, key_dim: int) -> None:
        """Check that this is the packed part of `n_regions` with keys of `key_dim` channels.

        Raises:
            OptionError: these are not the packed part of `n_regions` regions with plain keys of `key_dim` channels.
        """
        expected = n_regions, key_dim
        if self.known.get("fits") == expected:
            return
        self.check_stored(n_regions)
        layout = self.pages.layout
        if self.channels is None and layout.key_dim != key_dim:
            raise OptionError(
                f"packed keys of {layout.key_dim} channels for plain ones of {key_dim}; name the kept ones in "
                "`channels`"
            )
        if self.value_channels is None and self.whole_value_dim not in (0, layout.value_dim):
            raise OptionError(
                f"packed values of {layout.value_dim} channels for plain ones of {self.whole_value_dim}; name the kept "
                "ones in `value_channels`"
            )
        self.known["fits"] = expected

    def check_stored(self, n_regions: int) -> None:
        """Check the number of regions, and that they have what the layout needs.

        Raises:
            OptionError: not as many regions, or not what the layout needs.
        """
        layout = self.pages.layout
        if self.table.shape[0] != n_regions:
            raise OptionError(f"{self.table.shape[0]} packed regions for {n_regions} plain ones; give one for each")
        if self.rope is not None and not (layout.key.per_channel and self.channels is None and self.balance is None):
            raise OptionError("rope= needs scales per channel, all channels and no balance; leave rope= out")
        for tensor in (self.key_scales, self.key_zeros):
            if layout.key.fixed != (tensor is not None):
                need = "needs" if layout.key.fixed else "takes no"
                raise OptionError(f"this layout {need} calibrated key_scales and key_zeros in PackedRegions")

    def part(self, rows: slice | npt.NDArray[np.int64]) -> PackedRegions:
        """Return some of the regions: whole sequences if scales are calibrated.

        They are copies unless the rows are neighbours.
        """
        at = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.table.device)
        channels, balance, values = (
            None if t is None else t[at] for t in (self.channels, self.balance, self.value_channels)
        )
        table, lens, dead = self.table[at], self.lens[at], self.dead[at]
        return replace(
            self, table=table, lens=lens, dead=dead, channels=channels, balance=balance, value_channels=values
        )
