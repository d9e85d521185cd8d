"""Aligned buffers for direct reads, and slots: buffers with one owner at a time, which a loader fills."""

from __future__ import annotations

import contextlib
import enum
import mmap
from typing import Any

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


class SlotState(enum.Enum):
    """Who owns a slot: no one, a ticket that is not waited for yet, or the one who reads it."""

    FREE = "free"
    LOADING = "loading"
    IN_USE = "in use"


class Slot:
    """A buffer that is read only while nothing is written to it.

    Args:
        data: (n,) uint8, from `aligned_buffer` or of a device.

    Attributes:
        state: who owns it. Only the thread that reads slots changes it. view: of the bytes; empty where they are on a
            device.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.state = SlotState.FREE
        numbers: Any = data.numpy() if data.is_cpu else b""
        self.view = memoryview(numbers)

    def to(self, state: SlotState, *, of: tuple[SlotState, ...]) -> None:
        """The next state of one of the states `of`."""
        assert self.state in of, f"a slot that is {self.state.value} cannot become {state.value}"
        self.state = state

    def release(self) -> None:
        """Its reader is done."""
        self.to(SlotState.FREE, of=(SlotState.IN_USE,))
