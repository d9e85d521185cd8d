"""Files read and written past the page cache, in small requests that do not wait for Python's lock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Protocol

from millpond.errors import DataError
from millpond.kernels.native import library

#: Bytes of one request. Shorter ones take more of a CPU; behind a longer one a short read of another thread waits.
REQUEST_BYTES = 2 << 20


def read_file(fd: int, room: memoryview, offset: int) -> int:
    """Fill `room` from an offset of a file; return how many bytes there were until its end.

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
    num_read = int(function(fd, place, len(room), offset, REQUEST_BYTES))
    if num_read == -errno.ENOSYS:
        return os.preadv(fd, [room], offset)
    if num_read < 0:
        raise OSError(-num_read, os.strerror(-num_read))
    return num_read


_DIRECT = getattr(os, "O_DIRECT", 0)


class ReadableFile(Protocol):
    """File that a loader reads from.

    Attributes:
        path: Name shown in errors.
        size: Bytes of the file.
    """

    path: Path
    size: int

    def read_into(self, offset: int, room: memoryview) -> int:
        """Read up to `len(room)` bytes at an offset; return how many were read.

        Raises:
            OSError: of the system.
        """
        ...


class WritableFile(ReadableFile, Protocol):
    """File that a loader also writes to."""

    def write_from(self, offset: int, data: memoryview) -> int:
        """Write `data`; return how many bytes were written.

        Raises:
            OSError: of the system.
        """
        ...


class DirectFile:
    """File read with O_DIRECT if supported, else through the page cache, which is emptied.

    Offsets, lengths and addresses of reads are multiples of `ALIGNMENT`; the last read of a file is shorter.

    Attributes:
        direct: Whether reads bypass the page cache.

    Raises:
        DataError: the file cannot be opened.
    """

    _flags = os.O_RDONLY

    def __init__(self, path: Path) -> None:
        self.path = path
        self.direct = bool(_DIRECT)
        try:
            self._fd = self._open()
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise DataError(f"{path} cannot be opened: {error.strerror}") from error

    def read_into(self, offset: int, room: memoryview) -> int:
        try:
            n = read_file(self._fd, room, offset)
        except OSError as error:
            self._go_on_buffered(error)
            n = read_file(self._fd, room, offset)
        self._forget(offset, len(room))
        return n

    def close(self) -> None:
        """Close the file; a second call changes nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        if self.direct:
            try:
                return self._make(self._flags | _DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return self._make(self._flags)

    def _make(self, flags: int) -> int:
        return os.open(self.path, flags)

    def _go_on_buffered(self, error: OSError) -> None:
        """Continue through the page cache if direct access is refused; raise other errors.

        Some file systems open files with O_DIRECT and refuse the reads.
        """
        if error.errno != errno.EINVAL or not self.direct:
            raise error
        self.direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_DIRECT)

    def _forget(self, offset: int, nbytes: int) -> None:
        """Empty the page cache of what was read or written through it."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


class ScratchFile(DirectFile):
    """Nameless file that this process reads and writes; it vanishes however the process ends.

    Args:
        folder: Folder on whose disk the bytes are stored.

    Raises:
        DataError: no file can be made there.
    """

    _flags = os.O_RDWR

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.size = 0

    def write_from(self, offset: int, data: memoryview) -> int:
        """Write `data`; return how many bytes were written.

        Its length, address and offset are multiples of `ALIGNMENT`.

        Raises:
            OSError: of the system.
        """
        try:
            n = os.pwritev(self._fd, [data], offset)
        except OSError as error:
            self._go_on_buffered(error)
            n = os.pwritev(self._fd, [data], offset)
        if not self.direct:
            os.fdatasync(self._fd)  # pages that are not written out stay in the cache
        self._forget(offset, len(data))
        return n

    def grow(self, nbytes: int) -> None:
        """Reserve `nbytes` more of the disk, after those reserved before.

        Raises:
            DataError: the disk lacks them; nothing was reserved.
        """
        try:
            os.posix_fallocate(self._fd, self.size, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)  # what was reserved before the disk was full
            free = os.fstatvfs(self._fd)
            raise DataError(
                f"{self.path}: {nbytes:,} more bytes for KV are wanted and {free.f_bavail * free.f_frsize:,} are free "
                f"({error.strerror}); free some, name another folder (disk=), or let fewer sequences run"
            ) from error
        self.size += nbytes

    def _make(self, flags: int) -> int:
        nameless = getattr(os, "O_TMPFILE", 0)
        if nameless:
            try:
                return os.open(self.path, flags | nameless, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
        fd, name = tempfile.mkstemp(prefix=".millpond-kv-", dir=self.path)
        try:
            if flags & _DIRECT:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _DIRECT)
        except OSError:
            os.close(fd)
            raise
        finally:
            os.unlink(name)
        return fd
