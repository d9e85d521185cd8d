"""Compaction of regions: slots as flat ids, and the moves that fill the gaps of evicted entries."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.kernels.eager.pages import gather, scatter
from millpond.kernels.pages import PageArrays


def slots_of(table: PageTable, pages: Tensor, lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Flat slot ids (R, width), and which of them hold an entry; ids of empty slots are 0."""
    slots = table.pool.slots
    valid = torch.arange(width, device=pages.device) < lens[:, None]
    first = pages[:, : -(-width // slots), None].long() * slots
    ids = (first + torch.arange(slots, device=pages.device)).flatten(1)[:, :width]
    return torch.where(valid, ids, 0), valid


def rows_at(arenas: list[Tensor], ids: Tensor) -> Tensor:
    """Rows of flat slot ids (any shape) out of a list of arenas."""
    return arenas[0].flatten(0, 1)[ids] if len(arenas) == 1 else gather(arenas, ids)


class SlotWriter:
    """Slots that are written again and again, sorted once by the arenas that they lie in.

    Args:
        arenas: of a pool, as it is. ids: (n,) flat slot ids.
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
    """Move the last entries that stay of each region (R, N) into the slots of those that leave."""
    column = torch.arange(ids.shape[1], device=ids.device)
    after = (valid & ~leave).sum(1, keepdim=True)
    target = ids[leave & (column < after)]
    if not len(target):
        return
    source = ids[valid & ~leave & (column >= after)]
    for arenas in arrays.arrays:
        scatter(arenas, target, rows_at(arenas, source))
