"""Blocks on a disk come back in their order, wherever their runs found room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from millpond.cache.pages.pool import PagePool
from millpond.cache.swap import read_pages
from millpond.cache.tiered.block_store import SLOT_BYTES, BlockStore, unpack


def test_a_block_whose_second_run_lies_before_its_first(tmp_path: Path) -> None:
    pool = PagePool(64, 64, torch.float32, slots=16)
    page_bytes = pool.page_bytes
    n = SLOT_BYTES // page_bytes + 2  # pages of a run and a bit of another
    small, filler, block = pool.allocate(1), pool.allocate(1), pool.allocate(n)
    draw = torch.Generator().manual_seed(0)
    for arenas in pool.arrays.arrays:
        for arena in arenas:
            arena.copy_(torch.randint(0, 1 << 20, arena.shape, generator=draw))
    store = BlockStore(tmp_path, 1 << 22)
    gap = store.put([pool], [np.repeat(small, 3)], lambda: None)
    assert store.put([pool], [filler], lambda: None) is not None
    assert gap is not None
    store.free(gap)
    found = store.put([pool], [block], lambda: None)
    assert found is not None
    first, second = store._extents.runs.offset[found.runs].tolist()
    assert second < first, "the rest of the block fits where another one was"
    into = pool.allocate(n)
    unpack([pool], [into], store.read(found))
    assert all(torch.equal(a, b) for a, b in zip(read_pages(pool, into), read_pages(pool, block), strict=True))
    store.close()
