"""Return of freed memory to the system, which the C library would keep, after large requests and between layers."""

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
    """From now on give large blocks their own mappings, which return when freed (glibc)."""
    option = _function("mallopt")
    if option is not None:
        option(_MMAP_THRESHOLD, MAPPED_BYTES)
        option(_TRIM_THRESHOLD, FREE_BYTES)


def give_back() -> None:
    """Return freed memory that the allocator keeps to the system (glibc), in milliseconds."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


class GivingBack:
    """Clock that returns freed memory at most every `EVERY_S` seconds."""

    def __init__(self) -> None:
        self._last = -EVERY_S

    def between_sweeps(self) -> None:
        """Return freed memory if `EVERY_S` seconds have passed since the last time."""
        now = time.monotonic()
        if now >= self._last + EVERY_S:
            self._last = now
            give_back()


@cache
def _function(name: str) -> Any:
    """Return a function of the C library, or None if it has none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None


#: Bytes of a pass's queries in one layer from which its temporaries are worth giving back.
LONG = 2**22
#: Bytes of queries in shorter passes, over all layers, after which theirs are.
MANY = 2**27
#: Bytes of queries read since memory was last given back. Threads may lose each other's part: it is then later.
_read = 0


def give_back_after(query_bytes: int) -> None:
    """Return freed memory before a layer attends, if passes are long or were many (glibc).

    Entries that stay are written between the large temporaries of the layers, whose gaps later temporaries do not fit
    into: without this the heap grows by more than the entries at every layer of a long pass, and slowly over the many
    short passes of a stream.

    Args:
        query_bytes: Bytes of the layer's queries in host memory.

    Entries that stay are written between the large temporaries of the layers, which then fit into no gap that they
    left: without this the heap grows by more than the entries at every layer of a long pass, and slowly over the many
    short passes of a stream.
    """
    global _read
    _read += query_bytes
    if query_bytes >= LONG or _read >= MANY:
        _read = 0
        give_back()
