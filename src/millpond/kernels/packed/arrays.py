"""The memory of a pool of packed pages, as the kernels see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from millpond.kernels.packed.layout import PackedLayout


@dataclass(slots=True)
class PackedArrays:
    """Arenas of equal size (the last may be shorter), as `PageArrays`, with one row of bytes per page.

    Attributes:
        layout: where what lies in a page.
        codes: per arena (pages_per_arena, page_bytes) uint8.
        positions: per arena (pages_per_arena, slots) int32: -1 marks a slot whose entry was evicted (a tombstone).
        scores, log_masses: as in `PageArrays`.
        bases: (5, n_arenas) int64 addresses: codes, nothing, positions, scores, log masses.
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

    @property
    def slots(self) -> int:
        return self.layout.slots

    def add_arena(self, n_pages: int | None = None) -> None:
        """Allocate one more arena, of `n_pages` pages if that is the last one. Live pages do not move."""
        n, p, dev = n_pages or self.pages_per_arena, self.slots, self.device
        self.codes.append(torch.empty(n, self.layout.page_bytes, dtype=torch.uint8, device=dev))
        self.positions.append(torch.empty(n, p, dtype=torch.int32, device=dev))
        self.scores.append(torch.empty(n, p, dtype=torch.float32, device=dev))
        if self.masses:
            self.log_masses.append(torch.empty(n, p, dtype=torch.float32, device=dev))
        self._refresh()

    def drop_last_arena(self) -> None:
        """Give the memory of the last arena back. No live page may lie in it."""
        for arenas in self.arrays:
            arenas.pop()
        self._refresh()

    def _refresh(self) -> None:
        empty = [0] * self.n_arenas
        addresses = [[t.data_ptr() for t in arenas] for arenas in self.arrays]
        rows = [addresses[0], empty, *addresses[1:], *([] if self.masses else [empty])]
        self.bases = torch.tensor(rows, dtype=torch.int64).to(self.device)

    @property
    def arrays(self) -> list[list[Tensor]]:
        """The arenas of every array that there is."""
        return [self.codes, self.positions, self.scores, *([self.log_masses] if self.masses else [])]

    @property
    def n_arenas(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, summed from the buffers themselves."""
        return sum(t.numel() * t.element_size() for arenas in self.arrays for t in arenas)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages, source[i] to target[i] (both (n,) int64 page ids): the copy of copy-on-write."""
        per = self.pages_per_arena
        for arenas in self.arrays:
            rows = [arenas[s // per][s % per].clone() for s in source.tolist()]
            for t, row in zip(target.tolist(), rows, strict=True):
                arenas[t // per][t % per] = row
