"""Memory that was freed and that the C library keeps, given back to the system.

Blocks below its threshold for mappings of their own, up to 32 MiB, come from a heap. Free pieces between blocks that
stay are kept there, and those that are too small for what is asked for next pile up beside every limit.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

#: Seconds from one return to the next: pages that are taken again cost a few milliseconds.
EVERY_S = 0.5


class FreeMemory:
    """Gives back what is free, at most every `EVERY_S` seconds; nothing where the C library cannot."""

    def __init__(self) -> None:
        self._last = -EVERY_S

    def give_back(self) -> bool:
        """Whether it was time for it."""
        now = time.monotonic()
        if now < self._last + EVERY_S:
            return False
        self._last = now
        trim = _trim()
        if trim is not None:
            trim(0)
        return True


@cache
def _trim() -> Any:
    """The function of glibc; None elsewhere."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no such library
        return None
