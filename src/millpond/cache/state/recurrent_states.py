"""Recurrent and convolution states of a batch of sequences, as far as a cache moves them, and their share of memory."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.swap import Content


class StateSlots:
    """Counts the sequences whose states are in memory; all states of a sequence are one piece of one size.

    The states themselves lie with their batches, so that a step of decoding needs no copy of them.

    Args:
        page_bytes: Of all states of one sequence.
        memory_limit: The limit that they share with the page pools.
    """

    def __init__(self, page_bytes: int, memory_limit: MemoryLimit) -> None:
        self.page_bytes = page_bytes
        self._holders: weakref.WeakSet[RecurrentStates] = weakref.WeakSet()
        memory_limit.pools.append(self)

    def count(self, states: RecurrentStates) -> None:
        """Count the states of one more batch from now on, as long as it is there."""
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
        """Assert that the states are those of `n_seq` sequences, and take the bytes that are counted."""
        assert self.n_live == n_seq, f"states of {self.n_live} sequences where {n_seq} have some"
        found = sum(states.nbytes() for states in self._holders)
        assert found == self.nbytes, f"states take {found} bytes, and {self.nbytes} are counted"


class RecurrentStates(Protocol):
    """The states of a batch of sequences, in all layers.

    Attributes:
        slots: What counts them; None: nothing does.
        cache: What the model's modules find them in.
    """

    slots: StateSlots | None
    cache: Any

    @property
    def n_seq(self) -> int:
        """Sequences with states, 0 before the first token and while they are out."""

    def nbytes(self) -> int:
        """Return bytes of all states."""

    def select(self, sequences: list[int]) -> None:
        """Become those of the given sequences, in this order."""

    def join(self, other: RecurrentStates) -> None:
        """Take over the states of another batch of the same model, which holds none afterwards."""

    def part(self, sequences: list[int], into: RecurrentStates) -> None:
        """Copy those of some sequences to `into`, which holds none."""

    def reset(self) -> None:
        """Forget all of them."""

    def copy_out(self) -> Content:
        """Return all of them, on the host."""

    def drop(self) -> None:
        """Free their memory; `put_back` comes next, or `reset`."""

    def put_back(self, content: Content) -> None:
        """Hold again what `copy_out` gave."""
