"""The memory of a page pool as the kernels see it: arenas of pages and a table of their addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class PageArrays:
    """Arenas of equal size (the last may be shorter).

    Page `i` is row `i % pages_per_arena` of arena `i // pages_per_arena`.

    Natural rows everywhere: a slot is one row of `key_dim` (or `value_dim`) numbers.

    Attributes:
        keys: per arena (pages_per_arena, slots, key_dim), in the storage dtype.
        values: per arena (pages_per_arena, slots, value_dim), in the storage dtype.
        positions: per arena (pages_per_arena, slots) int32: the place of the entry in its own unpadded text.
        scores: per arena (pages_per_arena, slots) float32: the accumulator of the policy.
        log_masses: per arena (pages_per_arena, slots) float32, only with `masses`: the log of how many entries a slot
            stands for, which attention adds to its logit. 0 for one entry as it came.
        bases: (5, n_arenas) int64: the addresses of keys, values, positions, scores and log masses, on the pool's
            device; 0 for log masses where there are none.
        pages_per_arena: a power of two.
        slots: slots (tokens) per page, a power of two.
        key_dim, value_dim: numbers per key and per value.
        dtype: of keys and values.
        masses: whether slots carry a mass.
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

    def add_arena(self, n_pages: int | None = None) -> None:
        """Allocate one more arena, of `n_pages` pages if that is the last one. Live pages do not move."""
        n, p, dev = n_pages or self.pages_per_arena, self.slots, self.device
        self.keys.append(torch.empty(n, p, self.key_dim, dtype=self.dtype, device=dev))
        self.values.append(torch.empty(n, p, self.value_dim, dtype=self.dtype, device=dev))
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
        rows = [[t.data_ptr() for t in arenas] for arenas in self.arrays]
        rows += [[0] * self.n_arenas] * (5 - len(rows))
        self.bases = torch.tensor(rows, dtype=torch.int64).to(self.device)

    @property
    def arrays(self) -> list[list[Tensor]]:
        """The arenas of every array that there is, in the order of `bases`."""
        return [self.keys, self.values, self.positions, self.scores, *([self.log_masses] if self.masses else [])]

    @property
    def n_arenas(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, summed from the buffers themselves."""
        return sum(t.numel() * t.element_size() for arenas in self.arrays for t in arenas)
