"""Sources of a peer's replies: a process that is restarted when it ends, or a file written elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from millpond.budget import Budget
from millpond.errors import DataError, OptionError
from millpond_lab.evals.decoding.batch import EncodedPrompt
from millpond_lab.evals.decoding.record import Cell
from millpond_lab.peer_process import PeerError, PeerProcess

#: Prompts in a row on which the process ends before the run is given up.
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


class RestartingPeer:
    """A child process that is started again when it ends on a prompt, and gets the same prompt once more.

    Args:
        command: program and arguments.
        presses: those that it will run, checked when it starts.

    Attributes:
        name: as it calls itself, with its version.
        software: versions, in words.

    Raises:
        OptionError: a press or an option that it does not know, or a program that cannot be run.
        PeerError: it does not start, or not in the format of a peer.
    """

    def __init__(self, command: Sequence[str], presses: Sequence[str]) -> None:
        self._command, self._presses = list(command), list(presses)
        self._process: PeerProcess | None = None
        self._deaths = 0
        self.name = self.software = ""
        self._start()

    def ask(self, request: Mapping[str, Any]) -> Any:
        try:
            reply = self._ask_twice(request)
        except PeerError as error:
            self._deaths += 1
            if self._deaths >= MOST_DEATHS:
                raise OptionError(
                    f"{self.name} ended on {self._deaths} prompts in a row ({error}); all but the last count as "
                    "failures; once it works, run the same command with another --out"
                ) from error
            raise
        self._deaths = 0
        return reply

    def _ask_twice(self, request: Mapping[str, Any]) -> Any:
        try:
            return self._exchange(request)
        except PeerError:
            return self._exchange(request)

    def _exchange(self, message: Mapping[str, Any]) -> Any:
        process = self._process or self._start()
        try:
            return process.ask(message)
        except PeerError:
            self._process = None
            raise

    def _start(self) -> PeerProcess:
        process = self._process = PeerProcess(self._command)
        found = self._exchange({"hello": self._presses})
        try:
            self.name, self.software, errors = str(found["peer"]), str(found["software"]), dict(found["errors"])
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            raise PeerError(f"{self._command[0]} does not answer in the format of a peer: {error}") from error
        if errors:
            self.close()
            raise OptionError("; ".join(f"{press}: {why}" for press, why in errors.items()))
        return process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ReplyFile:
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


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply.

    Attributes:
        answers: by question: tokens, or the reason why there are none.
        kept_share, kv_bytes, full_kv_bytes: as in `Record`, really held.
        pretended_share: of the entries, what attention is let see where the others were only hidden.
    """

    answers: tuple[tuple[int, ...] | str, ...]
    kept_share: float
    kv_bytes: int
    full_kv_bytes: int
    pretended_share: float | None = None


def request_of(cell: Cell, prompt: EncodedPrompt, eos: frozenset[int], limit: int | None) -> dict[str, Any]:
    """The request for one prompt of a cell."""
    first = prompt.asked[0]
    return {
        "id": "|".join((cell.method, cell.budget, cell.protocol, cell.task, prompt.sample.id, str(first.index))),
        "press": cell.method,
        **_amount(cell.budget, len(prompt.opening)),
        "opening": list(prompt.opening),
        "questions": [
            {
                "index": asked.index,
                "tokens": list(asked.tokens),
                "most": most_tokens(prompt, place, limit),
                "stop": list(asked.question.stop),
                "references": list(asked.question.references),
            }
            for place, asked in enumerate(prompt.asked)
        ],
        "eos": sorted(eos),
        "task": cell.task,
        "protocol": cell.protocol,
        "sample": prompt.sample.id,
    }


def most_tokens(prompt: EncodedPrompt, place: int, limit: int | None) -> int:
    """Tokens that may be decoded for a question: the last one is not read, so it needs no position."""
    asked = prompt.asked[place]
    most = asked.question.max_new_tokens
    return most if limit is None else min(most, limit - len(prompt.opening) - len(asked.tokens) + 1)


def reply_of(request: Mapping[str, Any], line: Any) -> Reply:
    """The reply to a request.

    Raises:
        PeerError: the peer answered with an error, or not in its format.
    """
    if isinstance(line, dict) and "error" in line:
        raise PeerError(str(line["error"]))
    try:
        if line["id"] != request["id"]:
            raise PeerError(f"the reply is to {line['id']!r}, not to {request['id']!r}")
        answers = tuple(
            str(one["error"]) if "error" in one else tuple(int(token) for token in one["tokens"])
            for one in line["answers"]
        )
        pretended = line.get("pretended_share")
        reply = Reply(
            answers,
            float(line["kept_share"]),
            int(line["kv_bytes"]),
            int(line["full_kv_bytes"]),
            None if pretended is None else float(pretended),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"not a reply: {type(error).__name__} {error}") from error
    if len(answers) != len(request["questions"]):
        raise PeerError(f"{len(answers)} answers to {len(request['questions'])} questions")
    return reply


def _amount(budget: str, length: int) -> dict[str, int | None]:
    """As many entries as Millpond keeps under the same budget."""
    if not budget:
        return {"keep": None}
    parsed = Budget.parse(budget)
    return {"bytes": int(parsed.amount)} if parsed.kind == "bytes" else {"keep": parsed.entries(length)}
