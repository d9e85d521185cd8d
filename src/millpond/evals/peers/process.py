"""Who answers requests: a child process, or a file of replies that were made elsewhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from millpond.errors import DataError, OptionError
from millpond.evals.peers.lines import PeerEvalError

#: So many prompts in a row on which the child ends: it will not answer the next one either.
MOST_DEATHS = 5


class Peer(Protocol):
    """Answers requests, see `lines`."""

    name: str
    software: str

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The reply to one request, as it came.

        Raises:
            PeerError: there is none for this prompt; another one may have one.
        """
        ...


class Child:
    """A child process in an environment of its own: one request per line in, one reply per line out.

    A child that ends on a prompt is asked once more; if it ends again, it is started anew for the next prompt.

    Attributes:
        name: as it calls itself, with its version. software: versions, in words.
    """

    def __init__(self, command: Sequence[str], presses: Sequence[str]) -> None:
        """Start it, and let it look at the presses that it will be asked for.

        Raises:
            OptionError: a press or an option that it does not know.
            PeerError: it does not start.
        """
        self._command, self._presses = list(command), list(presses)
        self._process: subprocess.Popen[str] | None = None
        self._deaths = 0
        self.name = self.software = ""
        self._start()

    def ask(self, request: Mapping[str, Any]) -> Any:
        try:
            reply = self._asked_twice(request)
        except PeerEvalError as error:
            self._deaths += 1
            if self._deaths >= MOST_DEATHS:
                raise OptionError(
                    f"{self.name} ended on {self._deaths} prompts in a row ({error}); all but the last count as "
                    "failures; once it works, run the same command with another --out"
                ) from error
            raise
        self._deaths = 0
        return reply

    def _asked_twice(self, request: Mapping[str, Any]) -> Any:
        """The reply; a child that ends, by whatever chance, is started anew and asked once more."""
        try:
            return self._asked(request)
        except PeerEvalError:
            return self._asked(request)

    def _asked(self, request: Mapping[str, Any]) -> Any:
        if self._process is None:
            self._start()
        return self._exchange(request)

    def close(self) -> None:
        """End the child."""
        if self._process is None:
            return
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was left to write has nobody to read it
                    pipe.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise OptionError(f"{self._command[0]} cannot be run: {error}") from error
        try:
            found = self._exchange({"hello": self._presses})
            self.name, self.software, errors = str(found["peer"]), str(found["software"]), dict(found["errors"])
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            raise PeerEvalError(f"{self._command[0]} does not speak as a peer does: {error}") from error
        if errors:
            self.close()
            raise OptionError("; ".join(f"{press}: {why}" for press, why in errors.items()))

    def _exchange(self, message: Mapping[str, Any]) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.close()
            raise PeerEvalError(f"the process ended without a reply (exit status {process.returncode})")
        try:
            return json.loads(line)
        except ValueError as error:
            self.close()
            raise PeerEvalError(f"the process wrote {line[:80]!r}, which is no reply") from error

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Written:
    """Replies in a file, for requests that `--export` wrote."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            DataError: the file cannot be read, or holds no replies of one peer.
        """
        self.path, self.software = path, ""
        self._replies: dict[str, Any] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        names = set()
        for number, line in enumerate(lines, 1):
            try:
                reply = json.loads(line)
                names.add(str(reply["peer"]))
                self._replies[reply["id"]] = reply
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}, line {number} is not a reply with id and peer") from error
        if len(names) != 1:
            raise DataError(f"{path} holds replies of {', '.join(sorted(names)) or 'nobody'}, not of one peer")
        self.name = names.pop()

    def ask(self, request: Mapping[str, Any]) -> Any:
        if request["id"] not in self._replies:
            raise DataError(f"{self.path} has no reply to {request['id']!r}; answer all requests that --export writes")
        return self._replies[request["id"]]
