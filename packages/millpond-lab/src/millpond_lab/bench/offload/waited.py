"""Time that a thread of the offloading benchmark waits for a core."""

from __future__ import annotations

from pathlib import Path


def waited_s() -> float:
    """Seconds in which this thread could have run, and other processes had the cores; 0 where the system does not say.

    With one thread of torch that is what was lost to them; with more, a part of it.
    """
    try:
        _, waited, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0.0
    return int(waited) / 1e9
