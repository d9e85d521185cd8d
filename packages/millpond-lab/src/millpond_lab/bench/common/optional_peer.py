"""A peer of a benchmark, or the reason why there is none; its script is in the repository's `benchmarks` folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from millpond_lab.peer_process import PeerError, PeerProcess

#: Seconds for a reply, by default.
TIMEOUT_S = 3600.0


class OptionalPeer:
    """A peer that is skipped where its environment does not exist.

    Args:
        name: of the peer, in reports.
        python: interpreter of its environment.
        script: its side of the exchange.
        made_by: the script that makes the environment.
        timeout_s: for each reply.

    Attributes:
        note: its versions, or why it was skipped.
    """

    def __init__(self, name: str, python: Path, script: Path, made_by: str, timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self.process: PeerProcess | None = None
        self.note = ""
        if not python.exists():
            self.note = f"{name} skipped: no environment; make one with {made_by}"
            return
        if not script.exists():
            self.note = f"{name} skipped: {script} is not here; run this in the root of Millpond's repository"
            return
        self.process = PeerProcess([str(python), "-W", "ignore", str(script)], name, timeout_s)
        try:
            self.note = str(self.ask({"hello": True})["versions"])
        except PeerError as error:
            self.note = f"{name} skipped: {error}"
            self.close()

    @property
    def running(self) -> bool:
        """Whether it takes requests."""
        return self.process is not None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            PeerError: the peer was skipped, ended, took too long, or answered with an error.
        """
        if self.process is None:
            raise PeerError(self.note or f"the {self.name} process is closed")
        answer: dict[str, Any] = self.process.ask(request)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
