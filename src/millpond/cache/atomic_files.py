"""Files that are either whole or absent: written under another name, synced and renamed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

#: End of the names of files that are being written.
PART = ".part"


def write_part(path: Path, data: bytes) -> Path:
    """Write what `path` shall hold to a file next to it, which `publish` renames.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PART}")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        remove_file(part)
        raise
    return part


def publish(part: Path, path: Path) -> None:
    """Give a file from `write_part` its name.

    Raises:
        OSError: it cannot be renamed; nothing is left of it.
    """
    try:
        part.replace(path)
    except OSError:
        remove_file(part)
        raise


def remove_file(path: Path) -> int:
    """Remove a file; returns the bytes that it had. One that cannot be removed stays."""
    try:
        size = path.stat().st_size
        path.unlink()
    except OSError:
        return 0
    return size


def sync_folder(folder: Path) -> None:
    """Let the names in a folder outlive a loss of power.

    Raises:
        OSError: the disk does not take them.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
