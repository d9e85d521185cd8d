"""Notes in the folders that GGUF files were converted to, and a list of these folders, without reading tensors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from millpond.models.cache_folder import cache_folder

#: Written into each converted folder when it is whole.
NOTE = "millpond-gguf.json"
#: Of a converted folder, where its file is.
SOURCE = "millpond-gguf-source.json"
#: Nanoseconds in which a file system may give two changes of a file one time.
_TICK = 100_000_000


@dataclass(frozen=True, slots=True)
class ConvertedFolder:
    """Folder that a GGUF file was converted to.

    Attributes:
        name: Name of the file.
        sha256: SHA-256 of the file.
        dtype: Dtype of the weights, such as "bf16".
        size: Bytes of the folder.
        source: The file; None if it is missing.
    """

    folder: Path
    name: str
    sha256: str
    dtype: str
    size: int
    source: Path | None


def converted_folders() -> Iterator[ConvertedFolder]:
    """Return all converted folders in the user's cache, by name."""
    for note in sorted(cache_folder().glob(f"gguf/*/*/{NOTE}")):
        note_content = read_note(note)
        if isinstance(name := note_content.get("file"), str):
            folder = note.parent
            size = sum(file.stat().st_size for file in folder.iterdir())
            yield ConvertedFolder(
                folder, name, str(note_content.get("sha256")), str(note_content.get("dtype")), size, source_of(folder)
            )


def read_note(path: Path) -> dict[str, Any]:
    """Return the content of a note, or nothing if it cannot be read."""
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else {}
    return {}


class FileIdentity(NamedTuple):
    """Identity of a file, equal while it is unchanged: times in ns since 1970, size in bytes."""

    path: str
    size: int
    modified: int
    changed: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the identity of a file.

        Raises:
            OSError: the file cannot be found.
        """
        status = path.stat()
        return cls(str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def note_source(folder: Path, path: Path, identity: FileIdentity, own_dtype: str) -> None:
    """Write the path of its file into a converted folder, if that can be written.

    Args:
        folder: Converted folder.
        path: GGUF file.
        identity: Identity of the file before it was read.
        own_dtype: Dtype that it is converted to by default.
    """
    settled = time.time_ns() - max(identity.modified, identity.changed) > _TICK
    text = json.dumps({**identity._asdict(), "own": own_dtype if settled else None}) + "\n"
    note = folder / SOURCE
    with suppress(OSError):
        if not note.is_file() or note.read_text(encoding="utf-8") != text:
            note.write_text(text, encoding="utf-8")


def own_dtype(folder: Path, path: Path) -> str | None:
    """Return the dtype that an unchanged file is converted to by default, or None.

    It is known if a folder was made of the file.
    """
    note = read_note(folder / SOURCE)
    try:
        same = all(note.get(name) == value for name, value in FileIdentity.of(path)._asdict().items())
    except OSError:
        return None
    return str(note["own"]) if same and note.get("own") is not None else None


def source_of(folder: Path) -> Path | None:
    """Return the unchanged GGUF file that a folder was converted from, or None."""
    note = read_note(folder / SOURCE)
    try:
        path, status = Path(note["path"]), Path(note["path"]).stat()
        return path if (status.st_size, status.st_mtime_ns) == (note["size"], note["modified"]) else None
    except (OSError, KeyError, TypeError, ValueError):
        return None
