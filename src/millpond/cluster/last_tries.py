"""LastTries: requests that end where they are lost once more go to workers one at a time."""

from __future__ import annotations

from millpond.cluster.ledger import LedgerEntry


class LastTries:
    """Requests that were lost as often as they may be, and had no new token since.

    One of them may be what ends its workers. On a worker together they would end together; alone, it ends alone.

    Args:
        max_replays: how often in a row a request is begun again.
    """

    def __init__(self, max_replays: int) -> None:
        self._max_replays = max_replays
        self._trying: LedgerEntry | None = None
        self._waiting: dict[LedgerEntry, None] = {}  # in the order in which they came

    def may_begin(self, entry: LedgerEntry, *, wait: bool) -> bool:
        """Whether a request may go to a worker now.

        Args:
            wait: where it may not, `over` returns it when its turn has come.
        """
        if not 0 < entry.replays >= self._max_replays:
            return True
        if self._trying in (None, entry):
            self._trying = entry
            return True
        if wait:
            self._waiting[entry] = None
        return False

    def over(self, entry: LedgerEntry) -> LedgerEntry | None:
        """A request has a new token or has ended; returns the next one, which may go to a worker now."""
        self._waiting.pop(entry, None)
        if self._trying is not entry:
            return None
        self._trying = next(iter(self._waiting), None)
        if self._trying is not None:
            del self._waiting[self._trying]
        return self._trying
