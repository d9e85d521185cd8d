"""Memory that was freed and that the C library keeps, given back to the system.

Blocks below its threshold for mappings of their own, up to 32 MiB, come from a heap. Free pieces between blocks that
stay are kept there, and those that are too small for what is wanted next pile up beyond every limit.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

#: Seconds from one return to the next between sweeps: pages that are taken again cost a few milliseconds.
EVERY_S = 0.5


def give_back() -> None:
    """Return what was freed, where the allocator keeps it (glibc); it takes milliseconds."""
    trim = _trim()
    if trim is not None:
        trim(0)


class GivingBack:
    """Returns of freed memory, at most every `EVERY_S` seconds."""

    def __init__(self) -> None:
        self._last = -EVERY_S

    def between_sweeps(self) -> None:
        """Return what was freed if it is time for it."""
        now = time.monotonic()
        if now >= self._last + EVERY_S:
            self._last = now
            give_back()


@cache
def _trim() -> Any:
    """The allocator's function; None where there is none such."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
