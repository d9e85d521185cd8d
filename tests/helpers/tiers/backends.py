"""Backends and files of a loader that delay, reorder and fail as a test says."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from millpond.errors import DataError
from millpond.tiers.files import DirectFile, ScratchFile


class ShuffledBackend:
    """Threads that start tasks of different slots in any order, after a random delay."""

    def __init__(self, seed: int, most_s: float = 0.002) -> None:
        self._random, self._most_s = random.Random(seed), most_s
        self._tasks: dict[int, list[Callable[[], None]]] = {}
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def submit(self, slot: int, task: Callable[[], None]) -> None:
        with self._changed:
            self._tasks.setdefault(slot, []).append(task)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                ready = [slot for slot, tasks in self._tasks.items() if tasks and slot not in self._busy]
                while not ready:
                    if self._closed and not any(self._tasks.values()):
                        return
                    self._changed.wait(0.1)
                    ready = [slot for slot, tasks in self._tasks.items() if tasks and slot not in self._busy]
                slot = self._random.choice(ready)
                self._busy.add(slot)
                task = self._tasks[slot].pop(0)
                delay = self._random.random() * self._most_s
            time.sleep(delay)
            task()
            with self._changed:
                self._busy.discard(slot)
                self._changed.notify_all()


class FaultyFile(DirectFile):
    """A file whose reads fail as long as `fault` is set: an error of the system, or only as many bytes."""

    fault: OSError | int | None = None
    times = 0  #: how often it still fails
    thread: int | None = None  #: whose reads alone fail; None: those of every thread

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tries = 0

    def read_into(self, offset: int, room: memoryview) -> int:
        self.tries += 1
        kind = type(self)
        other = kind.thread is not None and kind.thread != threading.get_ident()
        if kind.fault is None or kind.times <= 0 or other:
            return super().read_into(offset, room)
        kind.times -= 1
        if isinstance(kind.fault, OSError):
            raise kind.fault
        super().read_into(offset, room)
        return kind.fault


class FaultyScratch(ScratchFile):
    """A file of KV that fails as a test says.

    Attributes:
        bad: reads of these offsets fail. flipped: a byte at these offsets is another one when it is read. short: reads
            end half-way. stale: offset -> what is read there in place of what was written.
        full: bytes that the disk has. fails: errors of the next writes.
    """

    full: int | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bad: set[int] = set()
        self.flipped: set[int] = set()
        self.stale: dict[int, bytes] = {}
        self.short = False
        self.fails: list[OSError] = []
        self.written: dict[int, bytes] = {}

    def read_into(self, offset: int, room: memoryview) -> int:
        if any(offset <= bad < offset + len(room) for bad in self.bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        n = super().read_into(offset, room)
        for at in self.flipped:
            if offset <= at < offset + n:
                room[at - offset] ^= 1
        for at, data in self.stale.items():
            if offset <= at and at + len(data) <= offset + n:
                room[at - offset : at - offset + len(data)] = data
        return n // 2 if self.short else n

    def write_from(self, offset: int, data: memoryview) -> int:
        if self.fails:
            raise self.fails.pop()
        return super().write_from(offset, data)

    def grow(self, nbytes: int) -> None:
        if type(self).full is not None and self.size + nbytes > type(self).full:
            raise DataError(f"{self.path}: {nbytes:,} more bytes for KV are wanted and 0 are free")
        super().grow(nbytes)
