"""Bytes that were read from a disk, put into pages by the threads that read, in few steps under Python's lock."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.swap.pages import write_pages

#: Bytes of the numbers in which pages are copied.
_WIDTH = 8


class PagesInto:
    """The contents of a pool's pages, ready to be written to.

    Args:
        pool: has all the pages already that will be written.
    """

    def __init__(self, pool: RefCountedPool[Any]) -> None:
        self._pool = pool
        arrays = pool.arrays.contents
        whole = all(
            arena.is_cpu and arena.is_contiguous() and (arena[0].nbytes | arena.data_ptr()) % _WIDTH == 0
            for arenas in arrays for arena in arenas
        )  # fmt: skip
        self._views = [[_numbers(arena) for arena in arenas] for arenas in arrays] if whole else None

    def put(self, pages: PageIds, data: Tensor, n_pages: int, which: npt.NDArray[np.int64]) -> None:
        """Give pages (n,) the content of pages `which` (n,) of those that `packed` put into data.

        Args:
            data: (bytes,) uint8. n_pages: that lie in it.
        """
        if self._views is None or data.data_ptr() % _WIDTH:
            write_pages(self._pool, pages, self._unpacked(data, n_pages, which), self._pool.arrays.contents)
            return
        numbers, begin = data.numpy(), 0
        per_arena = self._pool.arrays.pages_per_arena
        arenas, rows = pages // per_arena, pages % per_arena
        first = int(arenas[0])
        alone = bool((arenas == first).all())
        all_of_them = len(which) == n_pages and bool((np.diff(which) == 1).all())
        for views in self._views:
            end = begin + n_pages * views[first].shape[1] * _WIDTH
            content = numbers[begin:end].view(np.int64).reshape(n_pages, -1)
            content = content if all_of_them else content[which]
            if alone:
                views[first][rows] = content
            else:
                for arena in np.unique(arenas).tolist():
                    there = arenas == arena
                    views[arena][rows[there]] = content[there]
            begin = end

    def _unpacked(self, data: Tensor, n_pages: int, which: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        found, begin = [], 0
        for arenas in self._pool.arrays.contents:
            shape, dtype = arenas[0].shape[1:], arenas[0].dtype
            end = begin + n_pages * shape.numel() * dtype.itemsize
            content = data[begin:end].view(dtype).reshape(n_pages, *shape)
            found.append(content[torch.from_numpy(which)])
            begin = end
        return tuple(found)


def _numbers(arena: Tensor) -> npt.NDArray[np.int64]:
    """The pages of an arena as rows of numbers."""
    found: npt.NDArray[np.int64] = arena.detach().view(len(arena), -1).view(torch.int64).numpy()
    return found
