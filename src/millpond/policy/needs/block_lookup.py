"""Protocol of policies that retrieve stored entries in blocks (InfLLM)."""

from __future__ import annotations

from typing import Literal, Protocol


class AlwaysSeen(Protocol):
    """What a query sees whatever is looked up: the sinks, the newest entries, and those that fill no block yet."""

    @property
    def sinks(self) -> int:
        """The first positions of the text."""
        ...

    @property
    def block(self) -> int:
        """Entries that are looked up together."""
        ...

    def local(self, budget: int) -> int:
        """The newest positions that a query sees, its own among them."""
        ...

    def blocks(self, budget: int) -> int:
        """The blocks that fit besides what is always attended."""
        ...


class BlockLookup(Protocol):
    """How blocks are made, compared and looked up."""

    @property
    def protect(self) -> AlwaysSeen:
        """What is always attended."""
        ...

    @property
    def representatives(self) -> int:
        """Entries of a block whose mean key stands for it."""
        ...

    @property
    def together(self) -> int:
        """Queries of a prompt that look up one set of blocks."""
        ...

    @property
    def far(self) -> Literal["one_distance", "true"]:
        """Where a looked-up entry stands: all at one distance after the local ones, or where the text put them."""
        ...
