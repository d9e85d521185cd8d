"""Page-aligned buffers for direct reads, and slots: buffers that a loader fills, with one owner each."""

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
    """Return the next multiple of `ALIGNMENT`.

    Example:
        >>> aligned_up(1), aligned_up(4096)
        (4096, 4096)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_down(nbytes: int) -> int:
    """Return the multiple of `ALIGNMENT` at or before `nbytes`."""
    return nbytes // ALIGNMENT * ALIGNMENT


def aligned_buffer(nbytes: int) -> Tensor:
    """Return (n,) uint8 in pages of its own, n the next multiple of `ALIGNMENT`.

    The pages return to the system with the tensor.
    """
    pages = mmap.mmap(-1, max(aligned_up(nbytes), ALIGNMENT))
    with contextlib.suppress(AttributeError, OSError):  # not on Linux, or a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class SlotState(enum.Enum):
    """Owner of a slot: nobody, a ticket that is not waited for yet, or its reader."""

    FREE = "free"
    LOADING = "loading"
    IN_USE = "in use"


class Slot:
    """A buffer that is read only while nothing is written to it.

    Args:
        data: (n,) uint8, from `aligned_buffer` or on a device.

    Attributes:
        state: Its owner. Only the thread that reads slots changes it.
        view: Memory of the bytes; empty if they are on a device.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.state = SlotState.FREE
        numbers: Any = data.numpy() if data.is_cpu else b""
        self.view = memoryview(numbers)

    def to(self, state: SlotState, *, of: tuple[SlotState, ...]) -> None:
        """Change from one of the states `of` to `state`."""
        assert self.state in of, f"a slot that is {self.state.value} cannot become {state.value}"
        self.state = state

    def release(self) -> None:
        """Free the slot after its reader is done."""
        self.to(SlotState.FREE, of=(SlotState.IN_USE,))
