"""Memory that was freed and that the C library keeps, given back to the system.

Blocks below its threshold for mappings of their own, which it raises up to 32 MiB by itself, come from a heap. Free
pieces between blocks that stay are kept there, and those that are too small for what is wanted next pile up beyond
every limit.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

#: Seconds from one return to the next between sweeps: pages that are taken again cost a few milliseconds.
EVERY_S = 0.5
#: Blocks from this size on have mappings of their own where memory has a limit: a model with int4 weights in 40 MiB
#: peaked at 60 to 85 MiB with the threshold that glibc had raised, and at 42 with this. Activations of a decoding step
#: are smaller.
MAPPED_BYTES = 2**20
#: What may be free at the end of the heap before it is given back.
FREE_BYTES = 2**22
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def map_large_blocks() -> None:
    """From now on let large blocks have mappings of their own, which go back when they are freed (glibc)."""
    option = _function("mallopt")
    if option is not None:
        option(_MMAP_THRESHOLD, MAPPED_BYTES)
        option(_TRIM_THRESHOLD, FREE_BYTES)


def give_back() -> None:
    """Return what was freed, where the allocator keeps it (glibc); it takes milliseconds."""
    trim = _function("malloc_trim")
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
def _function(name: str) -> Any:
    """A function of the allocator; None where there is none such."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
