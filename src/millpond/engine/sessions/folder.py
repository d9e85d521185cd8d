"""Folder of stored turns: one file each, below a limit on the disk; several processes may share it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from millpond.cache.atomic_files import PART, publish, remove_file, sync_folder, write_part
from millpond.engine.sessions.stored_turn import TurnPlace
from millpond.errors import OptionError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One stored turn.

    Attributes:
        session_id: Its name, 32 hexadecimal digits.
        n_tokens: Tokens of the text that its cache has read.
        nbytes: Bytes of its file.
        last_used: Time of its last use, in seconds since the epoch.
    """

    session_id: str
    n_tokens: int
    nbytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Stored sessions at one moment; counters count from the engine's start.

    Attributes:
        disk_bytes: Bytes of all files, when they were last counted.
        disk_limit: Limit of these bytes.
        waiting_bytes: Bytes of turns that are still to be written.
        hits: Counter of requests that continued a stored turn.
        misses: Counter of others that could have.
        stored: Counter of turns that were written.
        evicted: Counter of files that were removed to make room.
        torn: Counter of files that were cut, changed or foreign; they were removed.
        dropped: Counter of turns that were not written because too many waited, or one is larger than the limit.
        write_failures: Counter of files that the disk did not take.
        read_failures: Counter of files that the disk did not give.
    """

    disk_bytes: int = 0
    disk_limit: int = 0
    waiting_bytes: int = 0
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    torn: int = 0
    dropped: int = 0
    write_failures: int = 0
    read_failures: int = 0


_SECRET, _LOCK = "secret", "lock"
_SECRET_BYTES = 32


class SessionFolder:
    """Files of stored turns.

    Args:
        folder: Made where it does not exist, readable by its owner alone.
        limit: Most bytes of all files of turns.

    Attributes:
        counts: Counters of evicted files, write_failures and read_failures.
        nbytes: Bytes of all files, when last counted.
        secret: Secret of the folder, for keyed hashes.

    Raises:
        OptionError: it cannot be made, read or written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.counts: Counter[str] = Counter()
        self._fails = self._was_too_large = False
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                self.secret = self._read_secret()
                self.nbytes = self._make_room(0)
        except OSError as error:
            raise OptionError(f"sessions cannot be stored in {str(folder)!r} ({error}); name another folder") from error

    def derived(self, purpose: str) -> bytes:
        """Return a secret for another purpose, the same after a restart."""
        return hashlib.blake2b(purpose.encode(), key=self.secret, digest_size=32).digest()

    # ------------------------------------------------------------------ reading

    def lengths(self, salt: str, scope: str) -> dict[int, set[str]]:
        """Return the keys of the turns that are stored there, by the number of their tokens."""
        keys: dict[int, set[str]] = {}
        try:
            names = os.listdir(self.folder / salt / scope)
        except FileNotFoundError:
            return keys
        except OSError:
            self.counts["read_failures"] += 1
            return keys
        for name in names:
            place = TurnPlace.of(self.folder / salt / scope / name)
            if place is not None:
                keys.setdefault(place.length, set()).add(place.key)
        return keys

    def size_of(self, place: TurnPlace) -> int:
        """Return the bytes of a file; 0 where it is missing."""
        try:
            return place.path(self.folder).stat().st_size
        except OSError:
            return 0

    def read(self, place: TurnPlace, max_bytes: int | None = None) -> bytes | None:
        """Return the bytes of a file, which counts as used.

        None: it is missing, cannot be read, or is too large.

        Args:
            place: Name of the turn.
            max_bytes: Most bytes; None, and more than the limit: the limit.
        """
        path = place.path(self.folder)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > (self.limit if max_bytes is None else min(max_bytes, self.limit)):
                    return None
                data = file.read(size)
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError:
            self.counts["read_failures"] += 1
            return None
        return data

    def has(self, place: TurnPlace) -> bool:
        """Return whether there is such a file, which counts as used now."""
        try:
            os.utime(place.path(self.folder))
        except OSError:
            return False
        return True

    def infos(self, salt: str) -> list[SessionInfo]:
        """Return the turns of one salt, the last used first."""
        infos = []
        for path in self._files(salt):
            place = TurnPlace.of(path)
            with suppress(OSError):
                if place is not None:
                    stat = path.stat()
                    infos.append(SessionInfo(place.key, place.length, stat.st_size, stat.st_mtime))
        return sorted(infos, key=lambda info: (-info.last_used, info.session_id))

    # ------------------------------------------------------------------ writing

    def fits(self, n_bytes: int) -> bool:
        """Return whether a turn is no larger than the limit.

        The first one that is larger is told in the log.
        """
        if n_bytes > self.limit and not self._was_too_large:
            self._was_too_large = True
            _log.warning(
                "a turn of %s bytes is larger than the limit of %s, and is not stored; raise cache_disk",
                f"{n_bytes:,}",
                f"{self.limit:,}",
            )
        return n_bytes <= self.limit

    def write(
        self, place: TurnPlace, data: bytes, lock: AbstractContextManager[object], is_wanted: Callable[[], bool]
    ) -> bool:
        """Write a file; return False where it cannot be written, and then nothing is left of it.

        One that is larger than the limit is not written and evicts nothing.

        Args:
            place: Name of the turn.
            data: Bytes of the file.
            lock: Held while `is_wanted` is called.
            is_wanted: Called right before the file gets its name; False: it is removed.
        """
        if not self.fits(len(data)):
            return False
        path = place.path(self.folder)
        try:
            with self._locked():
                self.nbytes = self._make_room(len(data))
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                part = write_part(path, data)
                with lock:
                    if not is_wanted():
                        remove_file(part)
                        return False
                    publish(part, path)
                self.nbytes += len(data)
                sync_folder(path.parent)
        except OSError as error:
            self.counts["write_failures"] += 1
            if not self._fails:  # once, until a file is written again
                _log.warning(
                    "a turn of %s bytes cannot be stored in %r (%s): requests go on, and later turns read their "
                    "prompts again; free space there, or start again with another folder",
                    f"{len(data):,}",
                    str(self.folder),
                    error,
                )
            self._fails = True
            return False
        self._fails = False
        return True

    def remove(self, place: TurnPlace) -> int:
        """Remove a file, and return its bytes; a missing one is no error."""
        return self._gone(remove_file(place.path(self.folder)))

    def remove_all(self, salt: str, session_id: str | None) -> int:
        """Remove the turns of one salt, or one of them; return how many there were."""
        removed = 0
        for path in self._files(salt):
            place = TurnPlace.of(path)
            if place is not None and session_id in (None, place.key):
                removed += bool(self.remove(place))
        return removed

    def _gone(self, n_bytes: int) -> int:
        self.nbytes = max(0, self.nbytes - n_bytes)
        return n_bytes

    def _make_room(self, n_bytes: int) -> int:
        """Evict until `n_bytes` more fit, and return the bytes that stay; called under the lock.

        Files that are being written are left-overs, since none is written now.
        """
        files: list[tuple[int, str, Path, int]] = []
        for path in self._files():
            with suppress(OSError):  # another process has removed it
                if path.name.endswith(PART):
                    remove_file(path)
                else:
                    stat = path.stat()
                    files.append((stat.st_mtime_ns, path.name, path, stat.st_size))
        total = sum(size for *_, size in files)
        for _, _, path, size in sorted(files):
            if total + n_bytes <= self.limit:
                break
            if remove_file(path):
                total -= size
                self.counts["evicted"] += 1
            with suppress(OSError):  # not empty
                path.parent.rmdir()
                path.parent.parent.rmdir()
        if total + n_bytes > self.limit:
            raise OSError(f"files of {total:,} bytes cannot be removed")
        return total

    def _files(self, salt: str = "*") -> Iterator[Path]:
        yield from (path for path in self.folder.glob(f"{salt}/*/*") if path.is_file())

    # ------------------------------------------------------------------ the folder

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes, and other engines of this one, from writing here."""
        with (self.folder / _LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read_secret(self) -> bytes:
        """Return the folder's secret, made if there is none, or a torn one.

        The turns of a torn one are found no more.

        Raises:
            OSError: it cannot be read or written.
        """
        path = self.folder / _SECRET
        with suppress(FileNotFoundError):
            secret = path.read_bytes()
            if len(secret) == _SECRET_BYTES:
                return secret
        new_secret = secrets.token_bytes(_SECRET_BYTES)
        part = write_part(path, new_secret)
        part.chmod(0o600)
        publish(part, path)
        return new_secret
