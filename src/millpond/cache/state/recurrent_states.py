"""Recurrent and convolution states of a batch of sequences, for a cache that moves them, and their share of memory."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.swap import Content


class StateSlots:
    """Count of the sequences whose states are in memory.

    All states of a sequence are one piece of one size. The states themselves are stored with their batches, so that a
    step of decoding needs no copy of them.

    Args:
        page_bytes: Bytes of all states of one sequence.
        memory_limit: Limit that they share with the page pools.
    """

    def __init__(self, page_bytes: int, memory_limit: MemoryLimit) -> None:
        self.page_bytes = page_bytes
        self._holders: weakref.WeakSet[RecurrentStates] = weakref.WeakSet()
        memory_limit.add(self)

    def count(self, states: RecurrentStates) -> None:
        """Count the states of one more batch, as long as it exists."""
        self._holders.add(states)

    @property
    def n_live(self) -> int:
        """Sequences with states."""
        return sum(states.n_seq for states in self._holders)

    @property
    def nbytes(self) -> int:
        return self.n_live * self.page_bytes

    def bytes_to_grow(self, n: int, *, exact: bool = False) -> int:
        return n * self.page_bytes

    def trim(self, keep: int = 0) -> int:
        return 0

    def check_integrity(self, n_seq: int) -> None:
        """Assert that the states are those of `n_seq` sequences and take the counted bytes."""
        assert self.n_live == n_seq, f"states of {self.n_live} sequences where {n_seq} have some"
        state_bytes = sum(states.nbytes() for states in self._holders)
        assert state_bytes == self.nbytes, f"states take {state_bytes} bytes, and {self.nbytes} are counted"


class RecurrentStates(Protocol):
    """States of a batch of sequences, in all layers.

    Attributes:
        slots: Count of the states; None if nothing counts them.
        cache: Cache in which the model's modules look them up.
    """

    slots: StateSlots | None
    cache: Any

    @property
    def n_seq(self) -> int:
        """Sequences with states, 0 before the first token and while they are dropped."""

    def nbytes(self) -> int:
        """Return the bytes of all states."""

    def select(self, sequences: list[int]) -> None:
        """Keep the states of the given sequences, in this order."""

    def join(self, other: RecurrentStates) -> None:
        """Take the states of another batch of the same model, and empty it."""

    def part(self, sequences: list[int], into: RecurrentStates) -> None:
        """Copy the states of some sequences to `into`, which holds none."""

    def reset(self) -> None:
        """Forget all states."""

    def copy_out(self) -> Content:
        """Return a copy of all states on the host."""

    def drop(self) -> None:
        """Free their memory; `put_back` comes next, or `reset`."""

    def put_back(self, content: Content) -> None:
        """Hold the states that `copy_out` returned."""
