"""Grows ratio budgets as the sequence grows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from millpond.cache.pages.page_table import PageTable


def grow(table: PageTable, positions: np.ndarray, budget: Callable[[PageTable, int, int], int]) -> None:
    """Before a step with tokens at `positions` (S,), -1 for none: give their sequences the budget of what is seen.

    budget: `budget(table, sequence, seen)` -> entries per KV head.
    """
    before = table.budgets()
    caps = before.copy()
    for sequence in np.flatnonzero(positions >= 0).tolist():
        caps[sequence] = budget(table, sequence, int(positions[sequence]) + 1)
    if (caps != before).any():
        table.set_budgets(caps)
