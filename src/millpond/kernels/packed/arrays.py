"""Memory of a pool of packed pages, as arrays for the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from millpond.kernels.arenas import Arenas
from millpond.kernels.packed.layout import PackedLayout


@dataclass(slots=True)
class PackedArrays(Arenas):
    """Arenas with one row of bytes per page. Position -1 marks a slot whose entry was evicted (a tombstone).

    Attributes:
        layout: where what lies in a page.
        codes: per arena (pages_per_arena, page_bytes) uint8.
    """

    pages_per_arena: int
    layout: PackedLayout
    device: torch.device
    masses: bool = False
    codes: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    log_masses: list[Tensor] = field(default_factory=list)
    bases: Tensor = field(default_factory=lambda: torch.zeros(5, 0, dtype=torch.int64))
    slots: int = field(init=False)

    def __post_init__(self) -> None:
        self.slots = self.layout.slots

    @property
    def contents(self) -> list[list[Tensor]]:
        return [self.codes]

    def _add_contents(self, n_pages: int) -> None:
        self.codes.append(torch.empty(n_pages, self.layout.page_bytes, dtype=torch.uint8, device=self.device))
