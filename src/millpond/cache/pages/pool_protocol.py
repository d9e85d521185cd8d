"""Protocol of what shares a memory limit: page pools, and the states of hybrids."""

from __future__ import annotations

from typing import Protocol


class Pool(Protocol):
    """Memory in pieces of one size.

    Attributes:
        page_bytes: of one piece.
    """

    page_bytes: int

    @property
    def n_live(self) -> int:
        """Pieces in use."""

    @property
    def nbytes(self) -> int:
        """Bytes of all memory held, free pieces included."""

    def bytes_to_grow(self, n: int) -> int:
        """Bytes that `n` more pieces take after the free ones are used."""

    def trim(self) -> int:
        """Give free memory back; returns its bytes."""
