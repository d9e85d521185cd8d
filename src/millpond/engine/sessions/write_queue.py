"""A thread that writes what is put into a queue of bounded size, so that the engine's steps do not wait for a disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class WriteQueue(Generic[T]):
    """The queue and its thread, which begins with the first item.

    Args:
        write: called in the thread with each item; what it raises ends that item alone. limit: most bytes that wait.

    Attributes:
        nbytes: that wait or are being written.
    """

    def __init__(self, write: Callable[[T], None], limit: int) -> None:
        self.nbytes = 0
        self._write, self._limit = write, limit
        self._items: deque[tuple[T, int]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def has_room(self, n_bytes: int) -> bool:
        """Whether an item of `n_bytes` would be taken now."""
        return not self._closed and self.nbytes + n_bytes <= self._limit

    def put(self, item: T, n_bytes: int) -> bool:
        """Write an item later; False: there is no room, and it is not taken. Never waits for the disk."""
        with self._changed:
            if not self.has_room(n_bytes):
                return False
            self._items.append((item, n_bytes))
            self.nbytes += n_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="millpond-sessions", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits to be written; False: `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.nbytes, timeout)

    def close(self) -> None:
        """Take nothing more, and wait until all is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                if not self._items:
                    return
                item, n_bytes = self._items.popleft()
            with suppress(Exception):
                self._write(item)
            with self._changed:
                self.nbytes -= n_bytes
                self._changed.notify_all()
