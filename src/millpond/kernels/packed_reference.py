"""The ops over packed pages in plain torch: the truth that native code is held to. See `packed_ops`."""

from __future__ import annotations

from millpond.kernels.eager.packed_decode import decode
from millpond.kernels.eager.packed_pages import read, write

__all__ = ["decode", "read", "write"]
