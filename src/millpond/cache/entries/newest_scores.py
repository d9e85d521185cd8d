"""Scores of entries that a decoding step has just stored."""

from __future__ import annotations

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
    ids, used = slots_of(table, table.pages, table.lens, width)
    if appended:
        last = (table.lens.long() - 1).clamp(min=0)[:, None]
        ids, used = ids.gather(1, last), used.gather(1, last)
    positions = rows_at(table.pool.arrays.positions, ids)
    newest = q_pos.repeat_interleave(table.n_kv_heads)[:, None]
    here = used & (positions == newest) & (newest >= 0)
    given = scores.reshape(-1, 1).expand_as(ids)
    scatter(table.pool.arrays.scores, ids[here], given[here])
