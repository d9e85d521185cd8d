"""Backend of threads that read with blocking calls, which release Python's lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class ThreadBackend:
    """Threads that run tasks in order, but never two of one slot at a time.

    Args:
        n_threads: Number of threads; one that reads 4 MiB at a time fills most disks.
    """

    def __init__(self, n_threads: int = 1) -> None:
        self._tasks: deque[tuple[int, Callable[[], None]]] = deque()
        self._busy: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"millpond-read-{n}", daemon=True) for n in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, slot: int, task: Callable[[], None]) -> None:
        """Run a task later, after all earlier ones of its slot."""
        with self._changed:
            assert not self._closed, "a closed backend takes no tasks"
            self._tasks.append((slot, task))
            self._changed.notify()

    def close(self) -> None:
        """Finish all submitted tasks, and end the threads; a second call changes nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            slot, task = taken
            try:
                task()
            finally:
                with self._changed:
                    self._busy.discard(slot)
                    self._changed.notify_all()

    def _take(self) -> tuple[int, Callable[[], None]] | None:
        """Wait for the next task whose slot no thread works on; None at the end."""
        with self._changed:
            while True:
                for n, (slot, task) in enumerate(self._tasks):
                    if slot not in self._busy:
                        del self._tasks[n]
                        self._busy.add(slot)
                        return slot, task
                if self._closed and not self._tasks:
                    return None
                self._changed.wait()
