"""HandoffBuffer: requests as bytes that wait in a worker until another one fetches them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from millpond.errors import MillpondError


class HandoffGoneError(MillpondError):
    """Bytes of a request that are held no more, so that it has to be begun again."""


class HandoffBuffer:
    """Bytes of requests by name, never more than a limit together, each for as long as it is wanted; for any thread.

    Args:
        limit: bytes that are held or reserved, at most. lease_s: seconds after which bytes are dropped that `keep` did
            not name. clock: of the leases, in seconds.
    """

    def __init__(self, limit: int, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._lease_s, self._clock = limit, lease_s, clock
        self._reserved: dict[str, int] = {}
        self._held: dict[str, bytes] = {}
        self._until: dict[str, float] = {}
        self._lock = threading.RLock()

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def size(self) -> int:
        """Bytes that are held or reserved."""
        with self._lock:
            return sum(self._reserved.values()) + sum(map(len, self._held.values()))

    def reserve(self, name: str, n_bytes: int) -> bool:
        """Set bytes aside for a request that is about to be packed; False: there is no room for them."""
        with self._lock:
            self.drop_lapsed()
            if name in self._reserved or name in self._held:
                return False
            if self.size + n_bytes > self._limit:
                return False
            self._reserved[name] = n_bytes
            return True

    def put(self, name: str, data: bytes) -> bool:
        """Hold the bytes of a request in place of what was reserved; False: they are more and do not fit."""
        with self._lock:
            self._reserved.pop(name, None)
            if self.size + len(data) > self._limit:
                return False
            self._held[name] = data
            self._until[name] = self._clock() + self._lease_s
            return True

    def fetch(self, name: str) -> bytes:
        """The bytes of a request; they stay.

        Raises:
            HandoffGoneError: they were fetched and released, or not wanted for too long.
        """
        with self._lock:
            if name not in self._held:
                raise HandoffGoneError(f"no request {name!r} waits to be taken over: begin it again")
            return self._held[name]

    def keep(self, names: Iterable[str]) -> None:
        """Prolong the leases of requests that are still wanted."""
        with self._lock:
            until = self._clock() + self._lease_s
            for name in names:
                if name in self._held:
                    self._until[name] = until

    def drop(self, name: str) -> None:
        """Free the bytes of a request, or what is reserved for it; none is no error."""
        with self._lock:
            self._reserved.pop(name, None)
            self._held.pop(name, None)
            self._until.pop(name, None)

    def drop_lapsed(self) -> list[str]:
        """Free what was not wanted for `lease_s` seconds; returns the names."""
        with self._lock:
            now = self._clock()
            names = [name for name, until in self._until.items() if until <= now]
            for name in names:
                self.drop(name)
            return names

    def clear(self) -> None:
        """Free everything."""
        with self._lock:
            for name in [*self._reserved, *self._held]:
                self.drop(name)
