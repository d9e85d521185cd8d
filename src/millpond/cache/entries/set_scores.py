"""Scores from outside a layer, stored with the entries of given tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.cache.entries.slot_view import SlotView
from millpond.cache.pages.page_table import PageTable


def set_scores(table: PageTable, before: Tensor, values: Tensor, factors: Tensor | None = None) -> None:
    """Give stored tokens of every sequence new scores, the same in all KV heads.

    Args:
        before: (S,) position of the first of these tokens. values: (S, n) float32, the scores of the tokens at
            positions before, before + 1, ...; tokens that are not stored are passed over.
        factors: (S,) on the scores of all earlier tokens; None: these stay as they are.
    """
    table.copy_on_write(whole=True)
    slots, n = SlotView.of(table, np.arange(table.n_regions)), values.shape[1]
    if not slots.positions.numel():
        return
    place = slots.positions - before.repeat_interleave(table.n_kv_heads)[:, None]
    told = slots.valid & (place >= 0) & (place < n)
    found = values.repeat_interleave(table.n_kv_heads, 0).gather(1, place.clamp(0, n - 1).long())
    if factors is not None:
        aged = slots.scores * factors.repeat_interleave(table.n_kv_heads)[:, None]
        found, told = torch.where(told, found, aged), told | (slots.valid & (place < 0))
    slots.rescore(found, told)
