"""What a page table follows on the host of lengths that a kernel writes on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from millpond.cache.pages.page_table import PageTable


def test_lengths_that_are_behind_stay_so_until_they_are_read() -> None:
    """A step in which every region grows comes right after one in which a kernel chose its victims."""
    device = SimpleNamespace(type="cuda")
    table: Any = SimpleNamespace(
        _slack=9,
        quantized=SimpleNamespace(stepped=lambda buries: None),
        _lengths=SimpleNamespace(behind=False),
        lens=SimpleNamespace(device=device),
    )
    PageTable.stepped(table, False, np.ones(1, dtype=bool))
    assert table._lengths.behind
    PageTable.stepped(table, True, np.ones(1, dtype=bool))
    assert table._lengths.behind
