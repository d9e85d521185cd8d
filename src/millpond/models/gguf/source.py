"""Note of a converted folder about the GGUF file that it was made of."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

#: The note in a converted folder.
SOURCE = "millpond-gguf-source.json"
#: Nanoseconds in which a file system may give two changes of a file one time.
_TICK = 100_000_000


class FileIdentity(NamedTuple):
    """A file as the system counts it, equal while it is unchanged: times in ns since 1970, size in bytes."""

    path: str
    size: int
    modified: int
    changed: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """
        Raises:
            OSError: the file cannot be found.
        """
        status = path.stat()
        return cls(str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def note_source(folder: Path, path: Path, identity: FileIdentity, own: str) -> None:
    """Write down in a converted folder where its file is, if that can be written.

    Args:
        identity: of the file before it was read. own: dtype that it is converted to by default.
    """
    settled = time.time_ns() - max(identity.modified, identity.changed) > _TICK
    text = json.dumps({**identity._asdict(), "own": own if settled else None}) + "\n"
    note = folder / SOURCE
    with suppress(OSError):
        if not note.is_file() or note.read_text(encoding="utf-8") != text:
            note.write_text(text, encoding="utf-8")


def source_of(folder: Path) -> Path | None:
    """The GGUF file that a folder was converted from, as it was then; None where there is none, or another one now."""
    try:
        note = _note(folder)
        path, status = Path(note["path"]), Path(note["path"]).stat()
        return path if (status.st_size, status.st_mtime_ns) == (note["size"], note["modified"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def own_dtype(folder: Path, path: Path) -> str | None:
    """The dtype that a file is converted to by default, if a folder was made of it and it is the same; else None."""
    try:
        note, identity = _note(folder), FileIdentity.of(path)
        same = all(note[name] == value for name, value in identity._asdict().items())
        return str(note["own"]) if same and note["own"] is not None else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note(folder: Path) -> dict[str, Any]:
    note: dict[str, Any] = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
    return note
