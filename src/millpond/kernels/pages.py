"""Memory of a page pool for the kernels: arenas of pages and a table of their addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from millpond.kernels.arenas import Arenas


@dataclass(slots=True)
class PageArrays(Arenas):
    """Arenas of pages of natural rows: a slot is one row of `key_dim` (or `value_dim`) numbers.

    Attributes:
        keys: per arena (pages_per_arena, slots, key_dim), in the storage dtype.
        values: per arena (pages_per_arena, slots, value_dim), in the storage dtype.
        key_dim, value_dim: numbers per key and per value.
        dtype: of keys and values.
    """

    pages_per_arena: int
    slots: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    masses: bool = False
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    log_masses: list[Tensor] = field(default_factory=list)
    bases: Tensor = field(default_factory=lambda: torch.zeros(5, 0, dtype=torch.int64))

    @property
    def contents(self) -> list[list[Tensor]]:
        return [self.keys, self.values]

    def _add_contents(self, n_pages: int) -> None:
        for arenas, dim in ((self.keys, self.key_dim), (self.values, self.value_dim)):
            arenas.append(torch.empty(n_pages, self.slots, dim, dtype=self.dtype, device=self.device))
