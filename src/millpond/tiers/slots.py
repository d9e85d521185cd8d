"""Slots: buffers with one owner at a time, which a loader fills."""

from __future__ import annotations

import enum
from typing import Any

from torch import Tensor


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
