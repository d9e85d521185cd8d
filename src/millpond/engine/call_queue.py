"""Calls into the engine's thread, round-robin over clients, so that many of one do not delay one of another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Call = Callable[[], None]
#: Between two steps calls may take this share of the last step's time, so that many requests that come do not hold up
#: those that decode; one call goes at least.
CALLS_SHARE = 0.2


class CallQueue:
    """Calls that wait. Of one client they keep their order; the clients take turns."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Call]] = {}  # the client whose turn it is comes first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, call: Call, client: str = "") -> None:
        """One more call."""
        self._waiting.setdefault(client, deque()).append(call)

    def take(self) -> Call:
        """The next call, which waits no longer.

        Raises:
            LookupError: none waits.

        Example:
            >>> queue = CallQueue()
            >>> for client in "aab":
            ...     queue.put(lambda client=client: print(client), client)
            >>> while queue:
            ...     queue.take()()
            a
            b
            a
        """
        if not self._waiting:
            raise LookupError("no call waits")
        client = next(iter(self._waiting))
        calls = self._waiting.pop(client)
        call = calls.popleft()
        if calls:
            self._waiting[client] = calls
        return call
