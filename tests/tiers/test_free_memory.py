"""Freed memory goes back to the system, now and then."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millpond.tiers import free_memory
from millpond.tiers.free_memory import GivingBack

#: The C library, and the MiB that the process holds.
BEGIN = """
import ctypes
import sys
from pathlib import Path
from millpond.tiers.free_memory import give_back, map_large_blocks

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
"""
HOLES = (
    BEGIN
    + """
before = held()
blocks = [libc.malloc(100_000) for _ in range(640)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[::2] + blocks[1:-1:2]:  # the last one stays, so the heap cannot shrink from its end
    libc.free(block)
kept = held() - before
give_back()
print(kept, held() - before)
"""
)


def test_it_is_given_back_at_most_every_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    now = [100.0]
    monkeypatch.setattr(free_memory, "_function", lambda name: trimmed.append)
    monkeypatch.setattr(free_memory.time, "monotonic", lambda: now[0])
    freed = GivingBack()
    freed.between_sweeps()
    freed.between_sweeps()
    assert trimmed == [0]
    now[0] += free_memory.EVERY_S
    freed.between_sweeps()
    assert trimmed == [0, 0]


def test_without_the_function_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_function", lambda name: None)
    free_memory.give_back()
    free_memory.map_large_blocks()


@pytest.mark.skipif(free_memory._function("malloc_trim") is None, reason="the C library has no malloc_trim")
def test_holes_of_a_heap_leave_memory() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    kept, after = map(int, done.stdout.split())
    assert kept > 50
    assert after < kept / 2


LARGE = (
    BEGIN
    + """
libc.free(libc.malloc(30 << 20))  # from now on glibc takes blocks of up to 30 MiB from its heap
if sys.argv[1] == "mapped":
    map_large_blocks()
before = held()
blocks = [libc.malloc(4 << 20) for _ in range(16)]
for block in blocks:
    ctypes.memset(block, 1, 4 << 20)
for block in blocks[:-1]:  # the last one stays, so the heap cannot shrink from its end
    libc.free(block)
print(held() - before)
"""
)


@pytest.mark.skipif(free_memory._function("mallopt") is None, reason="the C library has no mallopt")
def test_large_blocks_leave_memory_when_they_are_freed() -> None:
    found = {}
    for how in ("usual", "mapped"):
        done = subprocess.run([sys.executable, "-c", LARGE, how], capture_output=True, text=True, check=True)
        found[how] = int(done.stdout)
    assert found["usual"] > 50
    assert found["mapped"] < 8
