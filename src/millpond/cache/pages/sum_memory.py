"""Bytes of sums that are kept with pages, inside the limit that pages have."""

from __future__ import annotations

from millpond.cache.pages.memory_limit import MemoryLimit


class SumMemory:
    """Counts bytes of tensors that lie outside pages; a piece of it is one byte.

    Args:
        account: the limit that they share with the page pools; None: none is known.
    """

    page_bytes = 1

    def __init__(self, account: MemoryLimit | None = None) -> None:
        self._held = 0
        if account is not None:
            account.pools.append(self)

    def take(self, n: int) -> None:
        """`n` more bytes are held. Ask the account for room first."""
        self._held += n

    def release(self, n: int) -> None:
        """`n` bytes are free."""
        self._held -= n
        assert self._held >= 0, "released more than was taken"

    @property
    def n_live(self) -> int:
        """Bytes held."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes held: none is kept free."""
        return self._held

    def bytes_to_grow(self, n: int, *, exact: bool = False) -> int:
        """Bytes that `n` more pieces take."""
        return n

    def trim(self, keep: int = 0) -> int:
        """Nothing is kept free."""
        return 0

    def check_integrity(self, held: int) -> None:
        """Assert that exactly `held` bytes are counted."""
        assert self._held == held, f"{held} bytes of sums, and {self._held} are counted"
