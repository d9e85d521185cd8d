"""Eviction after a decoding step, where entries lie in tiers that no kernel reads together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.cache.entries.slot_view import SlotView
from millpond.cache.pages.page_table import PageTable
from millpond.kernels.decode_rules import DecodeRule, choose_evicted


def evict_due(table: PageTable, rule: DecodeRule, q_pos: Tensor, active: np.ndarray, window: int) -> None:
    """Let the entry leave that `rule` names, of each head that a step has put beyond its budget.

    Args:
        q_pos: (S,) int32, positions of the new tokens. active: (S,) bool, which sequences had one.
        window: 0, or what the layer sees.
    """
    over = (table.entries() > table.budgets()) & active[:, None]
    sequences = np.flatnonzero(over.any(1))
    if not len(sequences):
        return
    heads = table.n_kv_heads
    slots = SlotView.of(table, (sequences[:, None] * heads + np.arange(heads)).ravel())
    device = slots.positions.device
    rows = torch.from_numpy(slots.rows).to(device)
    query = q_pos[torch.from_numpy(sequences).to(device)].repeat_interleave(heads)[:, None]
    victim = choose_evicted(rule, slots.scores, slots.positions, query, table.recent[rows], window, heads)
    leave = torch.zeros_like(slots.valid).scatter_(1, victim[:, None], True)
    leave &= torch.from_numpy(over[sequences].ravel()).to(device)[:, None]
    table.shrink(sequences, slots.evict(leave).reshape(-1, heads))
