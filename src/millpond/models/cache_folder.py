"""Folder of the user in which downloaded and converted models are stored."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from millpond.errors import OptionError


def cache_folder() -> Path:
    """Return `$MILLPOND_CACHE`, or the platform's folder for caches; it need not exist yet."""
    folder = os.environ.get("MILLPOND_CACHE")
    if folder:
        return Path(folder).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "millpond"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond"


def make_room(folder: Path, n_bytes: int, purpose: str) -> int:
    """Create `folder`, and check that its disk has room for `n_bytes`.

    Args:
        folder: Folder to create.
        n_bytes: Bytes that must be free.
        purpose: Reason for the bytes, as the subject of the error's sentence.

    Returns:
        Bytes that are free.

    Raises:
        OptionError: the folder cannot be written, or the disk has too little room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OptionError(f"{purpose} needs a folder that can be written: {error}; set MILLPOND_CACHE") from error
    if free < n_bytes:
        raise OptionError(
            f"{purpose} needs {n_bytes / 1e6:,.0f} MB, and {folder} has {free / 1e6:,.0f} MB free; make room, or set "
            "MILLPOND_CACHE to a folder on another disk"
        )
    return free


def check_folder(folder: Path, n_bytes: int = 0) -> None:
    """Check that a folder exists, can be written, and has `n_bytes` free.

    Raises:
        OptionError: the folder is not there, cannot be written, or has less than `n_bytes` free.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder}: there is no such folder; make it, or name another one")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{folder} cannot be written; name another folder")
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if free < n_bytes:
        raise OptionError(f"{folder} has {free:,} bytes free, and {n_bytes:,} are needed; make room")
