"""Pages of a file in the system's page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path


def cached_bytes(path: Path) -> int | None:
    """Bytes of a file that are in the page cache; None where that cannot be counted."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
        del address
    return None if failed else mmap.PAGESIZE * sum(byte & 1 for byte in found)


def drop(path: Path) -> None:
    """Write a file out and empty the page cache of it."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
