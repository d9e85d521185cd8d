"""Logs of traffic: one JSON object a line, with a prompt or messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond import DataError
from millpond.plugins import brief

#: New tokens of a request whose line names none.
MAX_TOKENS = 128
_MOST_BYTES = 256 * 2**20
_ROLES = ("system", "user", "assistant", "developer", "tool")


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A line of the log.

    Attributes:
        prompt: A text or token ids; None where there are messages.
        messages: Messages of a chat; None where there is a prompt.
        max_tokens: New tokens, at most.
    """

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    max_tokens: int


def read_log(path: Path) -> list[LoggedRequest]:
    """Return the requests of a log; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, has no request, or a line is not a request; the error names the line.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"log {str(path)!r} has more than {_MOST_BYTES // 2**20} MiB; give a part of it")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"log {str(path)!r} cannot be read: {error}") from error
    found = [_request(line, f"{path.name}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"log {str(path)!r} has no request; a line reads {{'prompt': 'a text', 'max_tokens': 64}}")
    return found


def _request(line: str, where: str) -> LoggedRequest:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: no JSON: {error}") from error
    if not isinstance(given, dict):
        raise DataError(f"{where}: {brief(given)} must be an object with prompt or messages")
    prompt, messages = given.get("prompt"), given.get("messages")
    if (prompt is None) == (messages is None):
        raise DataError(f"{where}: give either prompt or messages")
    if prompt is not None and not _is_prompt(prompt):
        raise DataError(f"{where}: prompt={brief(prompt)} must be a text or token ids, and not empty")
    if messages is not None and not _are_messages(messages):
        raise DataError(f"{where}: messages={brief(messages)} must be a list of {{'role': ..., 'content': 'a text'}}")
    tokens = given.get("max_tokens", given.get("max_completion_tokens", MAX_TOKENS))
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= 2**20:
        raise DataError(f"{where}: max_tokens={brief(tokens)} must be a whole number from 1 on")
    return LoggedRequest(prompt, messages, tokens)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    whole = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    return whole and bool(prompt)


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)
            for one in messages
        )
    )
