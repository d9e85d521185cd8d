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

    def bytes_to_grow(self, n: int, *, exact: bool = False) -> int:
        """Bytes that `n` more pieces take after the free ones are used; exact: as few as it can take."""

    def trim(self, keep: int = 0) -> int:
        """Give memory back in which nothing is in use, but for `keep` free pieces; returns its bytes."""
