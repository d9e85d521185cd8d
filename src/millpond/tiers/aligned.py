"""Buffers that begin at a multiple of 4 KiB, as direct reads want them."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

#: Bytes that offsets, lengths and addresses of direct reads are multiples of.
ALIGNMENT = 4096


def aligned_up(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`.

    Example:
        >>> aligned_up(1), aligned_up(4096)
        (4096, 4096)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_down(nbytes: int) -> int:
    """The multiple of `ALIGNMENT` at or before `nbytes`."""
    return nbytes // ALIGNMENT * ALIGNMENT


def aligned_buffer(nbytes: int) -> Tensor:
    """(n,) uint8, n the next multiple of `ALIGNMENT`, in pages of its own, which go back to the system with it."""
    pages = mmap.mmap(-1, max(aligned_up(nbytes), ALIGNMENT))
    with contextlib.suppress(AttributeError, OSError):  # not on Linux, or a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
