"""Figures of stored sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One stored turn.

    Attributes:
        session_id: its name, 32 hexadecimal digits.
        n_tokens: of the text that its cache has read.
        nbytes: of its file. last_used: seconds since the epoch.
    """

    session_id: str
    n_tokens: int
    nbytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Stored sessions at one moment; counters count from the engine's start.

    Attributes:
        disk_bytes: of all files, when they were last counted. disk_limit: what they may never exceed.
        waiting_bytes: of turns that are still to be written.
        hits: counter of requests that continued a stored turn. misses: of others that could have.
        stored: counter of turns that were written. evicted: of files that were removed, for room.
        torn: counter of files that were cut, changed or foreign; they were removed.
        dropped: counter of turns that were not written because too many waited, or one is larger than the limit.
        write_failures, read_failures: counters of files that the disk did not take or give.
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
