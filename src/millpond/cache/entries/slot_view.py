"""Every slot of some regions, unquantized and quantized, for eviction orders that are not the decode kernel's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.entries.compaction import compact, rows_at, slots_of
from millpond.cache.pages.page_table import PageTable
from millpond.kernels.eager.pages import scatter


@dataclass(frozen=True, slots=True)
class SlotView:
    """The plain slots of regions `rows` (n,), then their packed ones.

    Attributes:
        ids: (n, plain) flat ids of the plain slots. used: (n, plain) bool, which of them hold an entry.
        positions: (n, N) int32, -1 for none. scores: (n, N) float32, anything there.
    """

    table: PageTable
    rows: npt.NDArray[np.int64]
    ids: Tensor
    used: Tensor
    positions: Tensor
    scores: Tensor

    @classmethod
    def of(cls, table: PageTable, rows: npt.NDArray[np.int64]) -> SlotView:
        """Those of some regions as they are now."""
        chosen = torch.from_numpy(rows).to(table.lens.device)
        width = int(table.lengths().ravel()[rows].max(initial=0))
        ids, used = slots_of(table, table.pages[chosen], table.lens[chosen], width)
        arrays, sealed = table.pool.arrays, table.sealed
        positions = torch.where(used, rows_at(arrays.positions, ids), -1) if width else ids.int()
        scores = rows_at(arrays.scores, ids) if width else ids.float()
        if sealed is not None:
            positions = torch.cat([positions, sealed.positions(rows)], 1)
            scores = torch.cat([scores, sealed.scores(rows)], 1)
        return cls(table, rows, ids, used, positions, scores)

    @property
    def valid(self) -> Tensor:
        """(n, N) bool: which slots hold an entry."""
        return self.positions >= 0

    def rescore(self, scores: Tensor, told: Tensor) -> None:
        """Write scores (n, N) where `told` (n, N) bool."""
        n = self.ids.shape[1]
        scatter(self.table.pool.arrays.scores, self.ids[told[:, :n]], scores[:, :n][told[:, :n]])
        if self.table.sealed is not None:
            self.table.sealed.rescore(self.rows, scores[:, n:], told[:, n:])

    def evict(self, gone: Tensor) -> npt.NDArray[np.int32]:
        """Release the entries in slots `gone` (n, N) bool; returns how many are left in plain slots, (n,).

        The caller tells the table.
        """
        n = self.ids.shape[1]
        compact(self.table.pool.arrays, self.ids, self.used, gone[:, :n])
        if self.table.sealed is not None:
            self.table.sealed.mark_evicted(self.rows, gone[:, n:])
        left: npt.NDArray[np.int32] = (self.used & ~gone[:, :n]).sum(1).cpu().numpy().astype(np.int32)
        return left
