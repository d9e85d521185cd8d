"""Rotations of a model's keys as tables that grow with the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millpond.cache.types import RotaryEmbedding
from millpond.kernels.packed.regions import Rope

#: Positions of the first tables.
INITIAL_POSITIONS = 1024


class GrowingRope:
    """Tables of one rotation of keys of `dim` channels on a device.

    All layers there with the same rotation share them.
    """

    def __init__(self, rotary: RotaryEmbedding, dim: int, device: torch.device) -> None:
        self._rotary, self._dim, self._device = rotary, dim, device
        self.tables = Rope.of(self._rotate, dim, INITIAL_POSITIONS, device)

    def reach(self, positions: int) -> None:
        """Extend the tables to at least this many positions."""
        if positions > self.tables.positions:
            self.tables = Rope.of(self._rotate, self._dim, max(positions, 2 * self.tables.positions), self._device)

    @torch.inference_mode(False)
    def _rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self._rotary.rotate(keys, positions)


class RopeTables:
    """Tables of the rotations of all layers.

    Args:
        rotations: Rotary embedding of each layer; None for one whose keys have no rotary position.
    """

    def __init__(self, rotations: Sequence[RotaryEmbedding | None]) -> None:
        self._rotations = rotations
        self._tables: dict[tuple[int, int, torch.device], GrowingRope] = {}

    def of(self, layer: int, key_dim: int, device: torch.device) -> GrowingRope | None:
        """Return the tables of one layer on its device; None if its keys are not rotated."""
        rotary = self._rotations[layer]
        if rotary is None:
            return None
        key = (id(rotary), key_dim, device)
        if key not in self._tables:
            self._tables[key] = GrowingRope(rotary, key_dim, device)
        return self._tables[key]
