"""A conversation of `millpond chat` that outlives the program: its messages, and the folder of its caches."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millpond.cache.atomic_files import publish, write_part
from millpond.cli.chat_backend import Message
from millpond.errors import DataError, OptionError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ROLES = ("system", "user", "assistant")


class ChatSession:
    """One named conversation.

    Args:
        home: folder of all of them. name: of this one.

    Attributes:
        cache_dir: for the caches of its turns.

    Raises:
        OptionError: no such name can be given, or its folder cannot be made.
    """

    def __init__(self, home: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise OptionError(
                f"session {name[:80]!r}: a name has 1 to 64 letters, digits, '.', '_' and '-', and begins with one of "
                "the first two"
            )
        self.name = name
        self._file = home / name / "messages.json"
        self.cache_dir = home / name / "cache"
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise OptionError(f"session {name!r} cannot be stored ({error})") from error

    def load(self, system: str | None) -> list[Message]:
        """Its messages so far; of a new one the system message, if there is one.

        Raises:
            OptionError: it began with another system message. DataError: its file is not as it was written.
        """
        beginning: list[Message] = [{"role": "system", "content": system}] if system else []
        try:
            found: Any = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return beginning
        except (OSError, ValueError) as error:
            raise self._broken(str(error)) from error
        if not isinstance(found, list) or not all(map(_is_message, found)):
            raise self._broken("it holds no messages")
        if system and found[:1] != beginning:
            raise OptionError(
                f"session {self.name!r} began with another system message; leave --system out, or name another session"
            )
        return found

    def save(self, messages: Sequence[Message]) -> None:
        """Keep the messages so far.

        Raises:
            DataError: they cannot be written; those of the turn before stay.
        """
        try:
            publish(write_part(self._file, json.dumps(list(messages)).encode()), self._file)
        except OSError as error:
            raise DataError(f"session {self.name!r} cannot be stored ({error})") from error

    def _broken(self, why: str) -> DataError:
        return DataError(f"{str(self._file)!r} cannot be read ({why}); remove it, or name another session")


def _is_message(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == {"role", "content"}
        and found["role"] in _ROLES
        and isinstance(found["content"], str)
    )
