"""Huge pages of 2 MiB for memory that is read repeatedly."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable

from torch import Tensor

from millpond.kernels.native import library

#: Tensors that lie this close to one another share a page, so their memory is requested as one.
NEAR = 2**16
#: Bytes per call, between two checks of the time limit: whole pages.
STRIDE = 2**26
PAGE = 2**21


def use_huge_pages(tensors: Iterable[Tensor], seconds: float = 5.0) -> int:
    """Ask the system for huge pages under CPU tensors; what they hold and where does not change.

    A hint: where the system has none to give, nothing happens. What it takes is the time of a copy.

    Args:
        tensors: read as a whole, contiguous.
        seconds: after which no more pages are requested.

    Returns:
        Bytes in huge pages now.
    """
    loaded = library.load()
    if loaded is None:
        return 0
    function = loaded[1].mp_use_huge_pages
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    done, deadline = 0, time.monotonic() + seconds
    for begin, end in _ranges(tensors):
        first = -(-begin // PAGE) * PAGE
        for at in range(first, end, STRIDE):
            if time.monotonic() > deadline:
                return done
            done += int(function(at, min(STRIDE, end - at)))
    return done


def _ranges(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses (begin, end) of the memory of the tensors, neighbours as one."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.is_cpu):
        if ranges and begin - ranges[-1][1] <= NEAR:
            begin, before = ranges.pop()
            end = max(end, before)
        ranges.append((begin, end))
    return ranges
