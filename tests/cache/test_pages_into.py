"""Pages that were read from a disk come into the pool bit for bit, wherever their bytes lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool import PagePool
from millpond.cache.swap.pages import read_pages
from millpond.cache.tiered.pages_into import PagesInto
from millpond.cache.tiered.visit import packed


def filled(dtype: torch.dtype) -> PagePool:
    pool = PagePool(8, 4, dtype, slots=16, account=MemoryLimit(1 << 18))
    pool.allocate(40)
    draw = torch.Generator().manual_seed(0)
    for arenas in pool.arrays.contents:
        for arena in arenas:
            arena.copy_(torch.randint(0, 99, arena.shape, generator=draw))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("which", [[0, 1, 2, 3, 4], [4, 1, 3]])
@pytest.mark.parametrize("into", [[30, 31, 32, 33, 34], [1, 39, 20, 7, 38]])
def test_pages_come_as_they_were_packed(dtype: torch.dtype, shift: int, which: list[int], into: list[int]) -> None:
    pool = filled(dtype)
    assert pool.arrays.n_arenas > 1
    source = np.array([3, 12, 25, 26, 27], dtype=np.int32)
    nbytes = len(source) * pool.kv_bytes_per_page
    data = torch.zeros(nbytes + 8, dtype=torch.uint8)[shift : shift + nbytes]
    packed(pool, source, data)
    pages = np.array(into[: len(which)], dtype=np.int32)
    expected = read_pages(pool, source[which], pool.arrays.contents)
    PagesInto(pool).put(pages, data, len(source), np.array(which))
    for found, wanted in zip(read_pages(pool, pages, pool.arrays.contents), expected, strict=True):
        assert torch.equal(found, wanted)
