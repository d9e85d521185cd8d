"""Early release of mapped file pages while weights are copied."""

from __future__ import annotations

import ctypes
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_MAPS, _SMAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) ")
_STRIDE = 2**22  #: Bytes that are copied at a time.
_DONT_NEED = 4  #: MADV_DONTNEED of Linux: pages of a file that were not written to are read again on demand


class Mapped:
    """The memory of this process that shows files which it has not written to, as it is now; none but on Linux.

    Args:
        weights: those that may move. If none lies in a file, no pages are counted: the kernel walks over all memory.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._ranges = _joined(_untouched()) if in_file(weights) else []

    def copy(self, old: Tensor, new: Tensor) -> Tensor:
        """Copy a weight, and return `new`; what was copied of a file leaves memory before the rest is read."""
        for part, place in zip(torch.split(old, _rows(old)), torch.split(new, _rows(old)), strict=True):
            place.copy_(part)
            self._release(part)
        return new

    @contextmanager
    def moving(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """What weights that move meanwhile held of files leaves memory; others who read it still find it."""
        weights = list(weights)
        before = [weight.detach() for weight in weights]  # holds the memory, so that its addresses are not reused
        yield
        for weight, old in zip(weights, before, strict=True):
            if weight.data_ptr() != old.data_ptr():
                self._release(old)

    def _release(self, old: Tensor) -> None:
        if old.is_cpu and old.is_contiguous():
            self._let_go(old.data_ptr(), old.data_ptr() + old.nbytes)

    def _let_go(self, begin: int, end: int) -> None:
        page = mmap.PAGESIZE
        first, last = -(-begin // page) * page, end // page * page
        if first < last and any(low <= first and last <= high for low, high in self._ranges):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)


def _rows(matrix: Tensor) -> int:
    """Rows that are copied at a time."""
    return max(1, _STRIDE // max(1, matrix[:1].nbytes))


def in_file(weights: Iterable[Tensor]) -> bool:
    """Whether one of them lies in a mapped file; never but on Linux."""
    try:
        headers = [_HEADER.match(line) for line in _MAPS.read_text().splitlines()]
    except OSError:
        return False
    files = [(int(header[1], 16), int(header[2], 16)) for header in headers if header is not None and header[3] != "0"]
    begins = [begin for begin, _ in files]  # they ascend
    for weight in weights:
        place = bisect_right(begins, weight.data_ptr()) - 1
        if weight.is_cpu and place >= 0 and weight.data_ptr() < files[place][1]:
            return True
    return False


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that ascend, neighbours as one: advice splits the mapping of a file."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            begin, _ = joined.pop()
        joined.append((begin, end))
    return joined


def _untouched() -> Iterator[tuple[int, int]]:
    """Addresses (begin, end) of mapped files of which no page was written to."""
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:
        return
    place: tuple[int, int] | None = None
    for line in lines:
        header = _HEADER.match(line)
        if header is not None:
            place = (int(header[1], 16), int(header[2], 16)) if header[3] != "0" else None
        elif place is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield place
