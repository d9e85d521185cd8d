"""Reads of a file into memory in small requests, between which nothing waits for Python's lock."""

from __future__ import annotations

import ctypes
import errno
import os

from millpond.kernels.native import library

#: Bytes of one request. Shorter ones take more of a CPU; behind a longer one a short read of another thread waits.
REQUEST_BYTES = 2 << 20


def read_file(fd: int, room: memoryview, offset: int) -> int:
    """Fill `room` from an offset of a file; returns how many bytes there were until its end.

    Raises:
        OSError: of the system.
    """
    loaded = library.load() if len(room) > REQUEST_BYTES else None
    if loaded is None:
        return os.preadv(fd, [room], offset)
    function = loaded[1].mp_read_file
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int64
    place = ctypes.addressof(ctypes.c_char.from_buffer(room))
    found = int(function(fd, place, len(room), offset, REQUEST_BYTES))
    if found == -errno.ENOSYS:
        return os.preadv(fd, [room], offset)
    if found < 0:
        raise OSError(-found, os.strerror(-found))
    return found
