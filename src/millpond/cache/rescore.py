"""Scores that come from outside a layer: written beside the entries of given tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.gaps import rows_at, slots_of
from millpond.cache.table import RegionTable
from millpond.kernels import reference


def rescore(table: RegionTable, before: Tensor, values: Tensor, factors: Tensor | None = None) -> None:
    """Give stored tokens of every sequence new scores, the same in all KV heads.

    Args:
        before: (S,) position of the first of these tokens. values: (S, n) float32, the scores of the tokens at
            positions before, before + 1, ...; tokens that are not stored are passed over.
        factors: (S,) on the scores of all earlier tokens; None: these stay as they are.
    """
    table.privatise(whole=True)
    ids, valid = slots_of(table, table.pages, table.lens, int(table.lengths().max(initial=0)))
    arrays, n_heads, n = table.pool.arrays, table.n_kv_heads, values.shape[1]
    if not ids.numel():
        return
    place = rows_at(arrays.positions, ids) - before.repeat_interleave(n_heads)[:, None]
    told = valid & (place >= 0) & (place < n)
    found = values.repeat_interleave(n_heads, 0).gather(1, place.clamp(0, n - 1).long())
    if factors is not None:
        aged = rows_at(arrays.scores, ids) * factors.repeat_interleave(n_heads)[:, None]
        found, told = torch.where(told, found, aged), told | (valid & (place < 0))
    reference.scatter(arrays.scores, ids[told], found[told])
