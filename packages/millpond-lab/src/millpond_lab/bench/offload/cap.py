"""Cap on the memory of a process: what it allocates, and the page cache of the files that it reads."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path

#: Bytes over the memory for what no ledger counts: stacks of threads, small objects, parts of products.
SLACK = 64 << 20
#: MADV_PAGEOUT; and the number of cachestat, Linux 6.5.
_PAGEOUT, _CACHESTAT = 21, 451
#: Of files with weights.
_SUFFIXES = (".safetensors", ".dat", ".weights", ".gguf", ".swp")


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Cap:
    """Memory that this process may take from now on: its own, and the page cache of a folder's files, together.

    Every 20 ms a thread drops the page cache, mapped pages too, where both together are more, and ends the process
    where its own memory alone is more. `RLIMIT_DATA` would refuse what is beyond it at once, but also the private
    mapping in which safetensors opens a file, as much as the file is long.

    Args:
        folder: of the files. memory: bytes, to which `SLACK` is added.
        enforce: end the process. Otherwise its own memory is measured and not limited.
    """

    def __init__(self, folder: Path, memory: int, *, enforce: bool = True) -> None:
        self._enforce = enforce
        self.limit = memory + SLACK
        gc.collect()
        self._base = anonymous_bytes()
        self._most_cached = self._most_own = 0
        self._ended = False
        self._folder, self._libc = folder.resolve(), ctypes.CDLL(None, use_errno=True)
        self._drop()
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> dict[str, int]:
        """What was taken at most; from now on the process may take more."""
        self._ended = True
        return {"most_own_bytes": self._most_own, "most_page_cache_bytes": self._most_cached}

    def _watch(self) -> None:
        while not self._ended:
            own, cached = anonymous_bytes() - self._base, self._cached()
            self._most_own = max(self._most_own, own)
            self._most_cached = max(self._most_cached, cached)
            if self._enforce and own > self.limit and not self._ended:
                print(f"{own:,} bytes taken, and {self.limit:,} allowed", file=sys.stderr, flush=True)
                os._exit(1)
            if cached and own + cached > self.limit:
                self._drop()
            time.sleep(0.02)

    def _files(self) -> list[Path]:
        return [path for path in self._folder.rglob("*") if path.suffix in _SUFFIXES]

    def _cached(self) -> int:
        """Bytes of the page cache that hold the files; 0 where the system does not say."""
        pages = 0
        for path in self._files():
            fd = os.open(path, os.O_RDONLY)
            span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
            if self._libc.syscall(_CACHESTAT, fd, span, found, 0) == 0:
                pages += found[0]
            os.close(fd)
        return pages * 4096

    def _drop(self) -> None:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if str(self._folder) in line:
                begin, _, end = line.split()[0].partition("-")
                size = ctypes.c_size_t(int(end, 16) - int(begin, 16))
                self._libc.madvise(ctypes.c_void_p(int(begin, 16)), size, _PAGEOUT)
        for path in self._files():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
