"""Servers under test: `millpond serve` in processes of their own, one for each layout of workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Self

from millpond.errors import OptionError

#: Layouts by name, with the options of `millpond serve`.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "single": (),
    "one replica": ("--replicas", "1"),
    "two replicas": ("--replicas", "2"),
    "split": ("--prefill", "1", "--decode", "1"),
}
#: Seconds in which a server starts and ends.
_START_S, _END_S = 300.0, 60.0


class BenchServer:
    """One server, which has started when it is made.

    Args:
        options: of `millpond serve`, without the address.

    Attributes:
        url: of the server.

    Raises:
        OptionError: it does not start; its last words are in the message.
    """

    def __init__(self, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "millpond", "serve", "--port", "0", *options]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"MILLPOND_API_KEYS": "", "MILLPOND_OPERATOR_KEY": ""},
        )
        self._reader = threading.Thread(target=self._drain, daemon=True)
        late = threading.Timer(_START_S, self._process.kill)
        late.start()
        try:
            self.url = self._address()
        except BaseException:
            self.close()
            raise
        finally:
            late.cancel()
        self._reader.start()

    def close(self) -> None:
        """End the server, and the workers that it started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._reader.is_alive():
            self._reader.join(_END_S)
        if self._process.stderr is not None and not self._reader.is_alive():
            self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _address(self) -> str:
        assert self._process.stderr is not None
        last = ""
        for line in self._process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                return found[0]
            last = line.strip() or last
        raise OptionError(f"millpond serve did not start: {last[:300]}")

    def _drain(self) -> None:
        """Read what the server writes, so that it never waits for a reader."""
        assert self._process.stderr is not None
        for _ in self._process.stderr:
            pass
