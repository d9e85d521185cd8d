"""Compaction of regions: slots as flat ids, and the moves that fill the gaps of evicted entries."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.kernels.eager.pages import gather, scatter
from millpond.kernels.pages import PageArrays
from millpond.kernels.transfers import on_device


def slots_of(table: PageTable, pages: Tensor, lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return flat slot ids (R, width), and which of them hold an entry; ids of others are 0."""
    slots = table.pool.slots
    valid = torch.arange(width, device=pages.device) < lens[:, None]
    first = pages[:, : -(-width // slots), None].long() * slots
    ids = (first + torch.arange(slots, device=pages.device)).flatten(1)[:, :width]
    return torch.where(valid, ids, 0), valid


def rows_at(arenas: list[Tensor], ids: Tensor) -> Tensor:
    """Return rows of flat slot ids (any shape) out of a list of arenas."""
    return arenas[0].flatten(0, 1)[ids] if len(arenas) == 1 else gather(arenas, ids)


class SlotWriter:
    """Slots that are written repeatedly, sorted once by their arenas.

    Args:
        arenas: Arenas of a pool, as it is.
        ids: Flat slot ids (n,).
    """

    def __init__(self, arenas: list[Tensor], ids: Tensor) -> None:
        per_arena = arenas[0].shape[0] * arenas[0].shape[1]
        self._order = ids.argsort(stable=True)
        ids = ids[self._order]
        ends = [0, *(ids // per_arena).bincount(minlength=len(arenas)).cumsum(0).tolist()]
        self._parts = [
            (arena, begin, end, ids[begin:end] % per_arena)
            for arena, (begin, end) in enumerate(pairwise(ends))
            if begin < end
        ]

    def put(self, arenas: list[Tensor], rows: Tensor) -> None:
        """Write rows (n, ...), of the arenas' dtype, to the slots."""
        rows = rows[self._order]
        for arena, begin, end, ids in self._parts:
            arenas[arena].flatten(0, 1).index_copy_(0, ids, rows[begin:end])


def compact(arrays: PageArrays, ids: Tensor, valid: Tensor, leave: Tensor) -> None:
    """Move the last entries that stay of each region (R, N) into the slots of evicted ones."""
    column = torch.arange(ids.shape[1], device=ids.device)
    after = (valid & ~leave).sum(1, keepdim=True)
    target = ids[leave & (column < after)]
    if not len(target):
        return
    source = ids[valid & ~leave & (column >= after)]
    for arenas in arrays.arrays:
        scatter(arenas, target, rows_at(arenas, source))


@dataclass(frozen=True, slots=True)
class SlotView:
    """The plain slots of regions `rows` (n,), then their packed ones.

    Attributes:
        table: Table of the layer.
        rows: Regions (n,).
        ids: Flat ids (n, plain) of the plain slots.
        used: Which of them hold an entry, (n, plain) bool.
        positions: Positions (n, N) int32, -1 for none.
        scores: Scores (n, N) float32, anything without an entry.
    """

    table: PageTable
    rows: npt.NDArray[np.int64]
    ids: Tensor
    used: Tensor
    positions: Tensor
    scores: Tensor

    @classmethod
    def of(cls, table: PageTable, rows: npt.NDArray[np.int64]) -> SlotView:
        """Return the slots of some regions as they are now."""
        chosen = on_device(rows, table.lens.device)
        width = int(table.lengths().ravel()[rows].max(initial=0))
        ids, used = slots_of(table, table.pages[chosen], table.lens[chosen], width)
        arrays, quantized = table.pool.arrays, table.quantized
        positions = torch.where(used, rows_at(arrays.positions, ids), -1) if width else ids.int()
        scores = rows_at(arrays.scores, ids) if width else ids.float()
        if quantized is not None:
            positions = torch.cat([positions, quantized.positions(rows)], 1)
            scores = torch.cat([scores, quantized.scores(rows)], 1)
        return cls(table, rows, ids, used, positions, scores)

    @property
    def valid(self) -> Tensor:
        """Which slots hold an entry, (n, N) bool."""
        return self.positions >= 0

    def rescore(self, scores: Tensor, told: Tensor) -> None:
        """Write scores (n, N) where `told` (n, N) bool."""
        n = self.ids.shape[1]
        scatter(self.table.pool.arrays.scores, self.ids[told[:, :n]], scores[:, :n][told[:, :n]])
        if self.table.quantized is not None:
            self.table.quantized.rescore(self.rows, scores[:, n:], told[:, n:])

    def evict(self, gone: Tensor) -> npt.NDArray[np.int32]:
        """Release entries in slots `gone` (n, N) bool; return how many remain in plain slots.

        The result is (n,). The caller updates the table.
        """
        n = self.ids.shape[1]
        compact(self.table.pool.arrays, self.ids, self.used, gone[:, :n])
        if self.table.quantized is not None:
            self.table.quantized.mark_evicted(self.rows, gone[:, n:])
        left: npt.NDArray[np.int32] = (self.used & ~gone[:, :n]).sum(1).cpu().numpy().astype(np.int32)
        return left
