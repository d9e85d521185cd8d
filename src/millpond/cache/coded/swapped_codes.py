"""SwappedCodes: sequences outside of the pool that a thread codes, and decodes before they are needed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from millpond.cache.coded.kept_coder import KeptCodes
from millpond.cache.coded.text import CodedText
from millpond.cache.pages.page_table import PageTable
from millpond.kernels.thread_count import alone

Coded = TypeVar("Coded")
Decoded = TypeVar("Decoded")


class SwappedCodes(ABC, Generic[Coded, Decoded]):
    """Sequences of a batch cache as codes.

    Args:
        thread: Where they are coded and decoded; coding begins at once.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._coded: Future[list[Coded]] = thread.submit(alone, self._code)
        self._decoded: Future[list[Decoded]] | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes on the host now."""

    @abstractmethod
    def write(self, tables: Sequence[PageTable]) -> Sequence[CodedText | KeptCodes]:
        """Write what was decoded to the pages that the tables hold again.

        Returns:
            For each sequence what later codes go on from.
        """

    @abstractmethod
    def _code(self) -> list[Coded]:
        """Return the codes of each sequence; called in the thread."""

    @abstractmethod
    def _decode(self) -> list[Decoded]:
        """Return what each sequence holds; called in the thread, once there are codes."""

    def prepare(self, *, wait: bool) -> bool:
        """Begin to decode, if that has not begun, and return whether it is done.

        Args:
            wait: Wait until it is.
        """
        if self._decoded is None:
            self._decoded = self._thread.submit(alone, self._decode)
        if wait:
            self._decoded.exception()
        return self._decoded.done()

    def decoded(self) -> list[Decoded]:
        """Return what each sequence holds; waits for it.

        Raises:
            Exception: it could not be coded or decoded.
        """
        self.prepare(wait=True)
        assert self._decoded is not None, "decoding has begun"
        return self._decoded.result()
