"""Scores of entries that a decoding step has just stored."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.entries.compaction import rows_at, slots_of
from millpond.cache.pages.page_table import PageTable
from millpond.kernels.eager.pages import scatter


def score_newest(table: PageTable, q_pos: Tensor, scores: Tensor, *, appended: bool) -> None:
    """Give the newest entry of each KV head its score; an entry that was not stored is passed over.

    Args:
        q_pos: (S,) int32 position of each sequence's new token, -1 where there is none.
        scores: (S, KV heads) float32.
        appended: each new entry lies in the last plain slot of its region; else it may lie anywhere.
    """
    width = int(table.lengths().max(initial=0))
    if not width:
        return
    ids, used = _last_slots(table) if appended else slots_of(table, table.pages, table.lens, width)
    positions = rows_at(table.pool.arrays.positions, ids)
    newest = q_pos.repeat_interleave(table.n_kv_heads)[:, None]
    here = used & (positions == newest) & (newest >= 0)
    given = scores.reshape(-1, 1).expand_as(ids)
    scatter(table.pool.arrays.scores, ids[here], given[here])


def _last_slots(table: PageTable) -> tuple[Tensor, Tensor]:
    """Flat id (R, 1) of the last slot of each region that holds an entry, and whether there is one; else 0."""
    used, slots = table.lens[:, None] > 0, table.pool.slots
    last = (table.lens.long()[:, None] - 1).clamp(min=0)
    ids = table.pages.gather(1, last // slots).long() * slots + last % slots
    return torch.where(used, ids, 0), used
