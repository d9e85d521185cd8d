"""Folders in which downloads and conversions are under way, each with a lock, and the removal of those left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # no such locks on this platform: only a folder's age counts
    fcntl = None

_LOCK = ".lock"
#: Seconds after which a folder without a lock is one that was left.
_OLD_S = 24 * 3600


@contextmanager
def workplace(parent: Path, prefix: str) -> Iterator[Path]:
    """An empty folder in `parent`, for one piece of work; at the end it is removed where it was not renamed.

    Folders of the same prefix whose processes are gone are removed first. An operating system gives a lock back when
    its process ends, however it ends, so the folder of a live process is never taken for one that was left.
    """
    remove_left(parent, prefix)
    made, lock, descriptor = _locked(parent, prefix)
    try:
        made.mkdir(mode=0o700)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def remove_left(parent: Path, prefix: str) -> None:
    """Remove the folders that processes left when they were ended; those of live ones stay."""
    for folder in parent.glob(f"{prefix}*"):
        lock = folder.with_name(folder.name.removesuffix(_LOCK) + _LOCK)
        with suppress(OSError):  # its process lives, another process was faster, or it is another user's
            if lock.exists():
                _remove_unlocked(lock)
            elif time.time() - folder.stat().st_mtime > _OLD_S:
                shutil.rmtree(folder)


def _locked(parent: Path, prefix: str) -> tuple[Path, Path, int]:
    """A name for a folder, its lock file, and the lock."""
    while True:
        made = parent / f"{prefix}{secrets.token_hex(8)}"
        lock = made.with_name(made.name + _LOCK)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if fcntl is None or os.fstat(descriptor).st_nlink:
            return made, lock, descriptor
        os.close(descriptor)  # another process removed it before it was locked


def _remove_unlocked(lock: Path) -> None:
    if fcntl is None:
        return
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
        lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
