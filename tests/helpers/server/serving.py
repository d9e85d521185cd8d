"""`millpond serve` in a process of its own, as an operator starts it, and the memory that it and its children hold."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


class Serving:
    """A running server.

    Attributes:
        url: of it. log: the lines that it wrote to stderr.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.log: list[str] = []
        self._process = process
        assert process.stderr is not None
        for line in process.stderr:
            self.log.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found[0]
                break
        else:
            raise AssertionError("".join(self.log))
        self._reader = threading.Thread(target=self.log.extend, args=(process.stderr,), daemon=True)
        self._reader.start()

    def resident_bytes(self) -> int:
        """Of the server and of the processes that it started."""
        server = psutil.Process(self._process.pid)
        total = 0
        for one in [server, *server.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
        return total

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


@contextmanager
def serving(*options: str) -> Iterator[Serving]:
    """A server of the bundled model on a free port with one thread, and these options of the command line."""
    command = [sys.executable, "-m", "millpond", "serve", "--port", "0", "--threads", "1", *options]
    environment: dict[str, Any] = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Serving(process)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
