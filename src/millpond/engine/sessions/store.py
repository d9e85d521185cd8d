"""Store of finished turns that wait to be written or are on the disk, found by the beginning of a text."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Generic, TypeVar

import numpy as np

from millpond.budget import parse_bytes
from millpond.engine.sessions.folder import SessionFolder, SessionInfo, SessionStats
from millpond.engine.sessions.stored_turn import StoredTurn, TurnPlace, keyed, places
from millpond.errors import MillpondError

T = TypeVar("T")


class WriteQueue(Generic[T]):
    """Queue of items to write, and its thread, which begins with the first item.

    Args:
        write: Called in the thread with each item; an exception ends that item alone.
        limit: Most bytes that wait.

    Attributes:
        nbytes: Bytes that wait or are being written.
    """

    def __init__(self, write: Callable[[T], None], limit: int) -> None:
        self.nbytes = 0
        self._write, self._limit = write, limit
        self._items: deque[tuple[T, int]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def has_room(self, n_bytes: int) -> bool:
        """Return whether an item of `n_bytes` would be taken now."""
        return not self._closed and self.nbytes + n_bytes <= self._limit

    def put(self, item: T, n_bytes: int) -> bool:
        """Queue an item for writing; return False if too many bytes wait already.

        Never waits for the disk.
        """
        with self._changed:
            if not self.has_room(n_bytes):
                return False
            self._items.append((item, n_bytes))
            self.nbytes += n_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="millpond-sessions", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits to be written; return False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.nbytes, timeout)

    def close(self) -> None:
        """Take nothing more, and wait until all is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                if not self._items:
                    return
                item, n_bytes = self._items.popleft()
            with suppress(Exception):
                self._write(item)
            with self._changed:
                self.nbytes -= n_bytes
                self._changed.notify_all()


#: Bytes of turns that may wait to be written; turns that end while more wait are not stored.
MAX_WAITING = 256 << 20
#: Bytes of turns that waiting requests may hold; checking one takes its bytes again.
MAX_LOADING = 256 << 20
#: Most bytes on the disk by default.
DEFAULT_DISK = "20GiB"


#: Converts a turn to its stored form, in the thread that writes it or in the thread that reads it first.
Finish = Callable[[StoredTurn], StoredTurn]


class _Waiting:
    """A turn that is not on the disk yet.

    Args:
        place: Its name.
        turn: The turn.
        finish: Converts it to its stored form; None: it is stored as it is.

    Attributes:
        place: Its name.
        nbytes: Most bytes of its file.
        wanted: Whether it is still to be written.
    """

    def __init__(self, place: TurnPlace, turn: StoredTurn, finish: Finish | None) -> None:
        self.place, self.nbytes, self.wanted = place, turn.file_bytes, True
        self._turn, self._finish, self._lock = turn, finish, threading.Lock()

    def turn(self) -> StoredTurn:
        """Return the turn in its stored form, which is made once."""
        with self._lock:
            if self._finish is not None:
                self._turn, self._finish = self._finish(self._turn), None
            return self._turn


class SessionStore:
    """Turns of one engine. Safe to use from several threads; `close` writes those that wait.

    Args:
        folder: Folder of the files.
        disk: Most bytes of the files.
        waiting: Most bytes of turns that wait to be written.
        loading: Most bytes of turns that were read for requests that have not begun; a larger one is read alone.

    Raises:
        OptionError: the folder cannot be used.
        BudgetError: `disk` is not an amount of bytes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        disk: str | int = DEFAULT_DISK,
        waiting: int = MAX_WAITING,
        loading: int = MAX_LOADING,
    ) -> None:
        self.loading = loading
        self.counts: Counter[str] = Counter()
        self._files = SessionFolder(Path(folder), parse_bytes(disk))
        self._waiting: dict[TurnPlace, _Waiting] = {}
        self._lock = RLock()
        self._queue: WriteQueue[_Waiting] = WriteQueue(self._write, waiting)

    @property
    def client_secret(self) -> bytes:
        """Secret for hashes of clients' keys that stay the same after a restart."""
        return self._files.derived("clients")

    def scope(self, *parts: str) -> str:
        """Return the name of all turns of a model whose caches are kept in one way.

        The parts are words.
        """
        return keyed(self._files.secret, "scope", *parts)

    def known(self, salt: str | None, scope: str, ids: np.ndarray) -> list[TurnPlace]:
        """Return the names of the stored turns that a text continues, the longest first.

        No file is opened.

        Args:
            salt: Salt of the request.
            scope: Name of the turns of a model.
            ids: The text, (n,); a turn is shorter than it.
        """
        salt_hash = self._salt(salt)
        stored = self._files.lengths(salt_hash, scope)
        with self._lock:
            for place in self._waiting:
                if (place.salt, place.scope) == (salt_hash, scope):
                    stored.setdefault(place.length, set()).add(place.key)
        lengths = [length for length in stored if 0 < length < len(ids)]
        candidates = places(self._files.secret, salt_hash, scope, ids, lengths)
        return [place for place in candidates if place.key in stored[place.length]][::-1]

    def size_of(self, place: TurnPlace) -> int:
        """Return the most bytes of a turn's file, now or once it is written; 0: there is none."""
        with self._lock:
            waiting = self._waiting.get(place)
        return self._files.size_of(place) if waiting is None else waiting.nbytes

    def read(self, place: TurnPlace, ids: np.ndarray, max_bytes: int | None = None) -> StoredTurn | None:
        """Return a turn that is stored or waits to be written; None if there is none.

        A torn file is removed.

        Args:
            place: Name of the turn.
            ids: Tokens that it must have read, (place.length,).
            max_bytes: Larger files are not read; None: the limit of the folder.
        """
        with self._lock:
            waiting = self._waiting.get(place)
        if waiting is not None:
            turn = waiting.turn()
            return replace(turn, tensors={name: tensor.clone() for name, tensor in turn.tensors.items()})
        data = self._files.read(place, max_bytes)
        if data is None:
            return None
        try:
            return StoredTurn.from_bytes(data, place, ids)
        except MillpondError:
            self.refuse(place)
            return None

    def put(self, salt: str | None, scope: str, turn: StoredTurn, finish: Finish | None = None) -> bool:
        """Store a turn, in another thread; return False if it is not accepted.

        A turn that is stored already stays, unless spans were forgotten, since its name does not show that.

        Args:
            salt: Salt of the request.
            scope: Name of the turns of a model.
            turn: The turn.
            finish: Converts it to its stored form, once, in another thread; None: it is stored as it is.
        """
        (place,) = places(self._files.secret, self._salt(salt), scope, turn.ids, [len(turn.ids)])
        with self._lock:
            if turn.forgotten:
                self._forget(place)
            elif place in self._waiting or self._files.has(place):
                return True
            waiting = _Waiting(place, turn, finish)
            if not self._files.fits(turn.nbytes) or not self._queue.put(waiting, turn.nbytes):
                self.counts["dropped"] += 1
                return False
            self._waiting[place] = waiting
            return True

    def has_room(self, n_bytes: int) -> bool:
        """Return whether a turn of `n_bytes` would be accepted now; if not, count it as dropped."""
        if self._files.fits(n_bytes) and self._queue.has_room(n_bytes):
            return True
        self.counts["dropped"] += 1
        return False

    def load_failed(self) -> None:
        """Count a failed read that the files did not cause."""
        self._files.counts["read_failures"] += 1

    def refuse(self, place: TurnPlace) -> None:
        """Remove a turn whose cache does not fit its header, and count it as torn."""
        with self._lock:
            self._forget(place)
            self._files.remove(place)
            self.counts["torn"] += 1

    # ------------------------------------------------------------------ what a client sees

    def sessions(self, salt: str | None) -> list[SessionInfo]:
        """Return the turns on the disk of one salt, the last used first."""
        return self._files.infos(self._salt(salt))

    def remove(self, salt: str | None, session_id: str | None = None) -> int:
        """Remove the turns of one salt, or one of them, also those that wait; return their number."""
        salt_hash = self._salt(salt)
        with self._lock:
            waiting = [
                waiting_place
                for waiting_place in self._waiting
                if waiting_place.salt == salt_hash and session_id in (None, waiting_place.key)
            ]
            for place in waiting:
                self._forget(place)
            return len(waiting) + self._files.remove_all(salt_hash, session_id)

    def stats(self) -> SessionStats:
        """Return bytes and counters."""
        files, counts = self._files, self.counts
        return SessionStats(
            disk_bytes=files.nbytes,
            disk_limit=files.limit,
            waiting_bytes=self._queue.nbytes,
            **{name: counts[name] for name in ("hits", "misses", "stored", "torn", "dropped")},
            **{name: files.counts[name] for name in ("evicted", "write_failures", "read_failures")},
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no turn waits to be written; return False after `timeout` seconds."""
        return self._queue.wait(timeout)

    def close(self) -> None:
        """Write the turns that wait, and take nothing more."""
        self._queue.close()

    # ------------------------------------------------------------------ internal

    def _salt(self, salt: str | None) -> str:
        return keyed(self._files.secret, "salt", salt)

    def _write(self, waiting: _Waiting) -> None:
        """Write a turn to the disk; called in the thread of the queue."""
        place = waiting.place
        try:
            if waiting.wanted:
                written = self._files.write(place, waiting.turn().to_bytes(place), self._lock, lambda: waiting.wanted)
                self.counts["stored"] += written
        except Exception:  # it cannot be serialized: only this turn is lost
            self._files.counts["write_failures"] += 1
        finally:
            with self._lock:
                if self._waiting.get(place) is waiting:
                    del self._waiting[place]

    def _forget(self, place: TurnPlace) -> None:
        waiting = self._waiting.pop(place, None)
        if waiting is not None:
            waiting.wanted = False
