"""Files that are read past the page cache, or at least without staying in it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from millpond.errors import DataError

_DIRECT = getattr(os, "O_DIRECT", 0)


class ReadableFile(Protocol):
    """What a loader reads from.

    Attributes:
        path: shown in errors. size: bytes of the file.
    """

    path: Path
    size: int

    def read_into(self, offset: int, room: memoryview) -> int:
        """Read as many bytes as there are, at most `len(room)`; returns how many.

        Raises:
            OSError: of the system.
        """
        ...


class DirectFile:
    """A file that is read with O_DIRECT where its file system has it, else through the page cache, which is emptied.

    Offsets, lengths and addresses of reads are multiples of `ALIGNMENT`; the last read of a file is shorter.

    Attributes:
        direct: whether reads pass the page cache by.

    Raises:
        DataError: the file cannot be opened.
    """

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
            n = os.preadv(self._fd, [room], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self._reopen_buffered()
            n = os.preadv(self._fd, [room], offset)
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, len(room), os.POSIX_FADV_DONTNEED)
        return n

    def close(self) -> None:
        """Close the file; a second call changes nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        if self.direct:
            try:
                return os.open(self.path, os.O_RDONLY | _DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return os.open(self.path, os.O_RDONLY)

    def _reopen_buffered(self) -> None:
        """The file system opens files for direct reads and refuses these reads."""
        self.direct = False
        buffered = os.open(self.path, os.O_RDONLY)
        os.dup2(buffered, self._fd)
        os.close(buffered)
