"""Peer process: a child in an environment of its own that answers one JSON request per line with one line of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Timer
from typing import Any, Self

from millpond.errors import MillpondError, OptionError

#: Seconds in which a child should end once its input is closed.
END_S = 30.0


class PeerError(MillpondError):
    """A peer that ended, took too long, or answered with an error or not in its format."""


class PeerProcess:
    """A running child process.

    Args:
        command: program and arguments.
        name: of the peer, in errors.
        timeout_s: for each reply; a child that takes longer is killed. None for no limit.

    Raises:
        OptionError: the program cannot be run.
    """

    def __init__(self, command: Sequence[str], name: str = "peer", timeout_s: float | None = None) -> None:
        self.name, self.timeout_s = name, timeout_s
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise OptionError(f"{command[0]} cannot be run: {error}") from error

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The reply to one request.

        Raises:
            PeerError: there is none, or it is not JSON; the child is ended then.
        """
        line, late = self._exchange(json.dumps(request) + "\n")
        if not line:
            self.close()
            status = f"(exit status {self._process.returncode})"
            raise PeerError(late or f"the {self.name} process ended without a reply {status}")
        try:
            return json.loads(line)
        except ValueError as error:
            self.close()
            raise PeerError(f"the {self.name} process wrote {line[:80]!r}, which is no reply") from error

    def _exchange(self, line: str) -> tuple[str, str]:
        """The next line of the child, "" if none comes; and why, where it was killed."""
        process, late = self._process, [""]
        assert process.stdin is not None
        assert process.stdout is not None

        def kill() -> None:
            late[0] = f"the {self.name} process gave no reply within {self.timeout_s:g} s and was ended"
            process.kill()

        timer = None if self.timeout_s is None else Timer(self.timeout_s, kill)
        if timer is not None:
            timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline(), late[0]
        except (OSError, ValueError):  # gone, or closed before
            return "", late[0]
        finally:
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """End the child."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # the child ended before it had read everything
                    pipe.close()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
