"""LocalProcess: a process of this machine, which can be ended while it is frozen, and never another of its number."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


class LocalProcess:
    """A process by the kernel's handle of it, which no later process of the same number has.

    Args:
        pid: Id of a process that runs on this machine. Where the system has no such handles, or it has ended, `kill`
            does nothing.
    """

    def __init__(self, pid: int) -> None:
        self._handle: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it at once; one that has ended is no error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
