"""Slots that are written again and again: sorted by arena once, written as if each were looked up."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from millpond.cache.entries.compaction import SlotWriter, rows_at


@given(ids=st.lists(st.integers(0, 3 * 8 - 1), unique=True, min_size=1, max_size=24), seed=st.integers(0, 9))
def test_rows_lie_where_they_are_looked_up(ids: list[int], seed: int) -> None:
    arenas = [torch.zeros(4, 2, 3), torch.zeros(4, 2, 3), torch.zeros(4, 2, 3)]
    slots = torch.tensor(ids)
    rows = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(seed))
    SlotWriter(arenas, slots).put(arenas, rows)
    assert torch.equal(rows_at(arenas, slots), rows)
    assert sum(int(arena.count_nonzero()) for arena in arenas) == int(rows.count_nonzero())


def test_the_last_arena_may_be_shorter() -> None:
    arenas = [torch.zeros(2, 2, 1), torch.zeros(1, 2, 1)]
    SlotWriter(arenas, torch.tensor([5, 0, 3])).put(arenas, torch.tensor([[5.0], [1.0], [3.0]]))
    assert [arena.flatten().tolist() for arena in arenas] == [[1, 0, 0, 3], [0, 5]]
