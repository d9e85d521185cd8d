"""A program in a pseudo-terminal, to which a test types."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType


class Terminal:
    """One program; what it writes is gathered in `shown`.

    Args:
        command: of the program. env: of it.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x28\0\x78\0\0\0\0\0")  # 40 rows of 120 columns
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm", "INPUTRC": os.devnull} | (env or {}),
        )
        os.close(theirs)
        self.shown = ""

    def write(self, text: str) -> None:
        """As if it were typed, all at once; what the program writes meanwhile is read."""
        data = text.encode()
        os.set_blocking(self._ours, False)
        while data:
            self._read(0)
            if select.select([], [self._ours], [], 0.05)[1]:
                data = data[os.write(self._ours, data[:512]) :]

    def wait(self, text: str, seconds: float = 60) -> str:
        """Until the program has written a text; returns what came up to its end, and forgets that."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} never came: {self.shown[-2000:]!r}"
            self._read(0.05)
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def _read(self, seconds: float) -> None:
        while select.select([self._ours], [], [], seconds)[0]:
            try:
                part = os.read(self._ours, 1 << 16)
            except OSError:  # the program is gone
                return
            if not part:
                return
            self.shown += part.decode(errors="replace")
            seconds = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._ours)
