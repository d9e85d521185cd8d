"""SessionStore: finished turns that wait to be written or are on the disk, found by the beginning of a text."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
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
    """The queue and its thread, which begins with the first item.

    Args:
        write: called in the thread with each item; what it raises ends that item alone. limit: most bytes that wait.

    Attributes:
        nbytes: that wait or are being written.
    """

    def __init__(self, write: Callable[[T], None], limit: int) -> None:
        self.nbytes = 0
        self._write, self._limit = write, limit
        self._items: deque[tuple[T, int]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def has_room(self, n_bytes: int) -> bool:
        """Whether an item of `n_bytes` would be taken now."""
        return not self._closed and self.nbytes + n_bytes <= self._limit

    def put(self, item: T, n_bytes: int) -> bool:
        """Write an item later; False: there is no room, and it is not taken. Never waits for the disk."""
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
        """Wait until nothing waits to be written; False: `timeout` seconds were not enough."""
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


#: Bytes of turns that may wait to be written; those that end while as many wait are not stored.
MOST_WAITING = 256 << 20
#: Bytes of turns that requests may hold that wait to begin; checking one takes as many again.
MOST_LOADING = 256 << 20
#: Most bytes on the disk, where nothing is said.
DEFAULT_DISK = "20GiB"


@dataclass(slots=True)
class _Waiting:
    """A turn that is not on the disk yet."""

    place: TurnPlace
    turn: StoredTurn
    wanted: bool = True


class SessionStore:
    """Turns of one engine. Safe to use from several threads; `close` writes what waits.

    Args:
        folder: of the files. disk: most bytes of them. waiting: most bytes of turns that wait to be written.
        loading: most bytes of turns that were read for requests that have not begun; one that is larger is read alone.

    Raises:
        OptionError: the folder cannot be used. BudgetError: no amount of bytes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        disk: str | int = DEFAULT_DISK,
        waiting: int = MOST_WAITING,
        loading: int = MOST_LOADING,
    ) -> None:
        self.loading = loading
        self.counts: Counter[str] = Counter()
        self._files = SessionFolder(Path(folder), parse_bytes(disk))
        self._waiting: dict[TurnPlace, _Waiting] = {}
        self._lock = RLock()
        self._queue: WriteQueue[_Waiting] = WriteQueue(self._write, waiting)

    @property
    def client_secret(self) -> bytes:
        """For hashes of clients' keys that stay the same after a restart."""
        return self._files.derived("clients")

    def scope(self, *parts: str) -> str:
        """Name of all turns of a model whose caches are kept in one way, in words."""
        return keyed(self._files.secret, "scope", *parts)

    def known(self, salt: str | None, scope: str, ids: np.ndarray) -> list[TurnPlace]:
        """Where the turns are stored that a text continues, the longest first; no file is opened.

        Args:
            salt: of the request. ids: (n,) the text; a turn is shorter than it.
        """
        own = self._salt(salt)
        stored = self._files.lengths(own, scope)
        with self._lock:
            for place in self._waiting:
                if (place.salt, place.scope) == (own, scope):
                    stored.setdefault(place.length, set()).add(place.key)
        lengths = [length for length in stored if 0 < length < len(ids)]
        found = places(self._files.secret, own, scope, ids, lengths)
        return [place for place in found if place.key in stored[place.length]][::-1]

    def size_of(self, place: TurnPlace) -> int:
        """Most bytes of a stored turn's file, or of that which one that waits will have; 0 where there is none."""
        with self._lock:
            waiting = self._waiting.get(place)
        return self._files.size_of(place) if waiting is None else waiting.turn.file_bytes

    def read(self, place: TurnPlace, ids: np.ndarray, most: int | None = None) -> StoredTurn | None:
        """A turn that is stored or waits to be written; None where there is none. One that is torn is removed.

        Args:
            ids: (place.length,) the tokens that it must have read. most: a larger file is not read; None: whatever the
                limit of the folder allows.
        """
        with self._lock:
            waiting = self._waiting.get(place)
        if waiting is not None:
            turn = waiting.turn
            return replace(turn, tensors={name: t.clone() for name, t in turn.tensors.items()})
        data = self._files.read(place, most)
        if data is None:
            return None
        try:
            return StoredTurn.from_bytes(data, place, ids)
        except MillpondError:
            self.refuse(place)
            return None

    def put(self, salt: str | None, scope: str, turn: StoredTurn) -> bool:
        """Store a turn, in a thread of its own; False: there is no room for it.

        One that is there stays, except where spans were forgotten: which these are, its name does not say.
        """
        (place,) = places(self._files.secret, self._salt(salt), scope, turn.ids, [len(turn.ids)])
        with self._lock:
            if turn.forgotten:
                self._forget(place)
            elif place in self._waiting or self._files.has(place):
                return True
            waiting = _Waiting(place, turn)
            if turn.nbytes > self._files.limit or not self._queue.put(waiting, turn.nbytes):
                self.counts["dropped"] += 1
                return False
            self._waiting[place] = waiting
            return True

    def has_room(self, n_bytes: int) -> bool:
        """Whether a turn of `n_bytes` would be taken now; else it is counted as dropped."""
        if n_bytes <= self._files.limit and self._queue.has_room(n_bytes):
            return True
        self.counts["dropped"] += 1
        return False

    def load_failed(self) -> None:
        """Turns could not be read for a reason that is not in their files."""
        self._files.counts["read_failures"] += 1

    def refuse(self, place: TurnPlace) -> None:
        """A turn whose cache does not fit what it says: it is removed, and counted as torn."""
        with self._lock:
            self._forget(place)
            self._files.remove(place)
            self.counts["torn"] += 1

    # ------------------------------------------------------------------ what a client sees

    def sessions(self, salt: str | None) -> list[SessionInfo]:
        """The turns on the disk of one salt, the last used first."""
        return self._files.infos(self._salt(salt))

    def remove(self, salt: str | None, session_id: str | None = None) -> int:
        """Remove the turns of one salt, or one of them, also those that wait; returns how many there were."""
        own = self._salt(salt)
        with self._lock:
            waiting = [p for p in self._waiting if p.salt == own and session_id in (None, p.key)]
            for place in waiting:
                self._forget(place)
            return len(waiting) + self._files.remove_all(own, session_id)

    def stats(self) -> SessionStats:
        """Bytes and counters."""
        files, counts = self._files, self.counts
        return SessionStats(
            disk_bytes=files.nbytes,
            disk_limit=files.limit,
            waiting_bytes=self._queue.nbytes,
            **{name: counts[name] for name in ("hits", "misses", "stored", "torn", "dropped")},
            **{name: files.counts[name] for name in ("evicted", "write_failures", "read_failures")},
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no turn waits to be written; False: `timeout` seconds were not enough."""
        return self._queue.wait(timeout)

    def close(self) -> None:
        """Write what waits, and take nothing more."""
        self._queue.close()

    # ------------------------------------------------------------------ internal

    def _salt(self, salt: str | None) -> str:
        return keyed(self._files.secret, "salt", salt)

    def _write(self, waiting: _Waiting) -> None:
        """In the thread of the queue: a turn goes to the disk."""
        place = waiting.place
        try:
            if waiting.wanted:
                written = self._files.write(place, waiting.turn.to_bytes(place), self._lock, lambda: waiting.wanted)
                self.counts["stored"] += written
        except Exception:  # it cannot be made bytes: it alone is lost
            self._files.counts["write_failures"] += 1
        finally:
            with self._lock:
                if self._waiting.get(place) is waiting:
                    del self._waiting[place]

    def _forget(self, place: TurnPlace) -> None:
        waiting = self._waiting.pop(place, None)
        if waiting is not None:
            waiting.wanted = False
