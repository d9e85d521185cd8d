"""Options that name files: how they are marked, who may name which, and how they are read.

In one's own process an option names any file by its path. Options that come over a network name only files that were
listed before: inside `only_listed` a path is refused before anything is opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from millpond.errors import OptionError

#: Third part of the annotation of an option that names a file: `Annotated[str, "help", FILE]`.
FILE = "file"
#: Most bytes of such a file.
MAX_BYTES = 256 * 2**20

_listed: ContextVar[Mapping[str, OptionFile] | None] = ContextVar("listed", default=None)


class OptionFile(str):
    """Path of a file that was read already.

    Attributes:
        name: Name in errors.
        content: Bytes of the file.
    """

    name: str
    content: bytes

    def __new__(cls, path: str | os.PathLike[str], name: str | None = None) -> OptionFile:
        """Read the file.

        Raises:
            OptionError: it cannot be read; see `read_file`.
        """
        path_text = super().__new__(cls, os.fspath(path))
        path_text.name = os.fspath(path) if name is None else name
        path_text.content = read_file(os.fspath(path))
        return path_text

    def __repr__(self) -> str:
        return repr(self.name)


class OwnText(str):
    """Option of the operator's own that names files inside: "duo_attention/heads=heads.json".

    Attributes:
        files: Files that it names, already read, by their paths. They are listed for this text, and for no other.
    """

    files: Mapping[str, OptionFile]

    def __new__(cls, text: str, files: Mapping[str, OptionFile]) -> OwnText:
        path_text = super().__new__(cls, text)
        path_text.files = files
        return path_text


class ReadWhenNamed(dict[str, OptionFile]):
    """Files by their paths, each read when it is first named, whatever its path."""

    def __contains__(self, path: object) -> bool:
        return True

    def __missing__(self, path: str) -> OptionFile:
        return self.setdefault(path, OptionFile(path))


def listed_files(paths: Mapping[str, str | os.PathLike[str]]) -> dict[str, OptionFile]:
    """Read files under the names by which options may name them.

    Raises:
        OptionError: one of them cannot be read; see `read_file`.
    """
    return {name: OptionFile(path, name) for name, path in paths.items()}


@contextmanager
def only_listed(files: Mapping[str, OptionFile] | None) -> Iterator[None]:
    """Let options name only these files, by their names, in the block; None changes nothing."""
    token = _listed.set(_listed.get() if files is None else files)
    try:
        yield
    finally:
        _listed.reset(token)


@contextmanager
def named_in(text: str) -> Iterator[None]:
    """Read the files that `text` names, if it is the operator's own, in the block."""
    with only_listed(text.files if isinstance(text, OwnText) else None):
        yield


def allowed(value: str, option: str) -> str:
    """Return `value` of an option that names a file, if it may be named; "" names none.

    Raises:
        OptionError: only listed files may be named, and `value` is not listed. The message is the same for every path.
    """
    files = _listed.get()
    if files is None or isinstance(value, OptionFile) or not value:
        return value
    if value not in files:
        listed = f"listed are {', '.join(sorted(files))}" if files else "it listed none"
        raise OptionError(
            f"{option} names a file: a request may name those that the server's operator listed "
            f"(--option-file NAME=PATH), by their names; {listed}"
        )
    return files[value]


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file that an option names.

    Raises:
        OptionError: it is not there, no regular file (a device, a pipe, a folder), or has more than `MAX_BYTES`.
    """
    if isinstance(path, OptionFile):
        return path.content
    name = os.fspath(path)
    try:
        handle = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as file:
            stats = os.fstat(handle)
            if not stat.S_ISREG(stats.st_mode):
                raise OptionError(f"{name!r} is no regular file")
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_BYTES:
        raise OptionError(f"{name!r} has more than {MAX_BYTES:,} bytes")
    return content


def shown(value: object) -> object:
    """Return an option's value as others may see it: only the last names of files."""
    if isinstance(value, OptionFile):
        return Path(value).name
    if isinstance(value, OwnText):
        for path in sorted(value.files, key=len, reverse=True):
            value = str(value).replace(path, Path(path).name)
    return value
