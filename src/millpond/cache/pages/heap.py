"""Release of freed memory to the system: between the layers of a long prompt, and after large requests."""

from __future__ import annotations

from millpond.tiers.free_memory import give_back

__all__ = ["LONG", "MANY", "give_back", "give_back_after"]

#: Bytes of a pass's queries in one layer from which its temporaries are worth giving back.
LONG = 2**22
#: Bytes of queries in shorter passes, over all layers, after which theirs are.
MANY = 2**27
#: Bytes of queries read since memory was last given back. Threads may lose each other's part: it is then later.
_read = 0


def give_back_after(query_bytes: int) -> None:
    """Before a layer attends to a part of a prompt: return what was freed, where passes are long or were many (glibc).

    Args:
        query_bytes: of the layer's queries in host memory.

    Entries that stay are written between the large temporaries of the layers, which then fit into no gap that they
    left: without this the heap grows by more than the entries at every layer of a long pass, and slowly over the many
    short passes of a stream.
    """
    global _read
    _read += query_bytes
    if query_bytes >= LONG or _read >= MANY:
        _read = 0
        give_back()
