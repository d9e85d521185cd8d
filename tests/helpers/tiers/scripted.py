"""Files of which one read or write fails, by its number."""

from __future__ import annotations

import errno
from typing import ClassVar

from millpond.tiers.buffers import aligned_buffer
from millpond.tiers.files import DirectFile, ScratchFile

READ_FAULTS, WRITE_FAULTS = ("error", "short", "flipped", "stale"), ("error", "short", "flipped", "lost")


class Script:
    """What happens to reads, or to writes, of all files together.

    Attributes:
        n: how many there were. first, times, fault: number of the first that fails, of how many, and how; "" is none.
        met: how many have failed.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, first: int = 0, times: int = 0, fault: str = "") -> None:
        self.n = self.met = 0
        self.first, self.times, self.fault = first, times, fault

    def next(self) -> str:
        self.n += 1
        if not self.first < self.n <= self.first + self.times:
            return ""
        self.met += 1
        return self.fault


def read_wrongly(fault: str, room: memoryview, n: int) -> int:
    """What a read gives that has read `n` bytes."""
    if fault == "error":
        raise OSError(errno.EIO, "Input/output error")
    if fault == "flipped":
        room[n // 3] ^= 4
    if fault == "stale":
        room[:n] = bytes(n)
    return n // 2 if fault == "short" else n


class ScriptedFile(DirectFile):
    """A file of weights."""

    reads: ClassVar[Script] = Script()

    def read_into(self, offset: int, room: memoryview) -> int:
        fault = self.reads.next()
        return read_wrongly(fault, room, super().read_into(offset, room))


class ScriptedScratch(ScratchFile):
    """A file of KV."""

    reads: ClassVar[Script] = Script()
    writes: ClassVar[Script] = Script()

    def read_into(self, offset: int, room: memoryview) -> int:
        fault = self.reads.next()
        return read_wrongly(fault, room, super().read_into(offset, room))

    def write_from(self, offset: int, data: memoryview) -> int:
        fault = self.writes.next()
        if fault == "error":
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault == "lost":  # as if it had been written
            return len(data)
        n = super().write_from(offset, data)
        if fault == "flipped":
            other = memoryview(aligned_buffer(len(data)).numpy())  # `data` itself stays as it is
            other[:] = data
            other[7] ^= 1
            super().write_from(offset, other)
        return n // 2 if fault == "short" else n
