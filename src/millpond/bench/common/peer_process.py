"""A peer in an environment of its own: a child process that takes one request per line and answers in JSON.

Its script lives in the repository's `benchmarks` folder, not in the package.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

from millpond.errors import MillpondError

#: Seconds that a child may take for an answer, by default.
TIMEOUT_S = 3600.0
#: Seconds in which it should end once nothing more is asked.
END_S = 30.0


class PeerError(MillpondError):
    """The child process could not answer."""


class PeerProcess:
    """A running child, or the reason why there is none.

    Args:
        name: of the peer, as reports show it. python: of its environment. script: what answers.
        made_by: the script that makes the environment, for the reason why there is none.
        timeout_s: of each answer; a child that takes longer is ended.

    Attributes:
        note: its versions, or why it was skipped.
    """

    def __init__(self, name: str, python: Path, script: Path, made_by: str, timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[str] | None = None
        self.note = ""
        if not python.exists():
            self.note = f"{name} skipped: no environment; make one with {made_by}"
            return
        if not script.exists():
            self.note = f"{name} skipped: {script} is not here; run this in the root of Millpond's repository"
            return
        self._child = subprocess.Popen(
            [str(python), "-W", "ignore", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.note = str(self.ask({"hello": True})["versions"])
        except PeerError as error:
            self.note = f"{name} skipped: {error}"
            self.close()

    @property
    def running(self) -> bool:
        """Whether it takes requests."""
        return self._child is not None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer.

        Raises:
            PeerError: the child is gone, was ended since it took too long, or answered with an error.
        """
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise PeerError(self.note or f"the {self.name} process is closed")
        late: list[str] = []

        def end() -> None:
            late.append(f"the {self.name} process gave no answer within {self._timeout_s:g} s and was ended")
            child.kill()

        timer = Timer(self._timeout_s, end)
        timer.start()
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError as error:
            raise PeerError(late[0] if late else f"the {self.name} process is gone ({error})") from error
        finally:
            timer.cancel()
        if not line:
            raise PeerError(late[0] if late else f"the {self.name} process ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            child, self._child = self._child, None
            if child.stdin is not None:
                with suppress(BrokenPipeError):  # it was ended before it had read everything
                    child.stdin.close()
            if child.stdout is not None:
                child.stdout.close()
            try:
                child.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
