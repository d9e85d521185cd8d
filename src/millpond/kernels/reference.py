"""The op set in plain torch: slow and short, the reference for every other implementation.

Meaning: see `OpSet`; shapes: `kernels.args`. Arithmetic runs in float32, in float64 where the pages are float64.
"""

from __future__ import annotations

from millpond.kernels.eager.attend import attend
from millpond.kernels.eager.decode_rows import decode_rows
from millpond.kernels.eager.head_rules import admit
from millpond.kernels.eager.packed_decode import decode
from millpond.kernels.eager.packed_pages import read_packed, write_packed
from millpond.kernels.eager.pages import read, write
from millpond.kernels.eager.prefill import prefill, window_signal
from millpond.kernels.eager.scan import absolute_sums, newest_alike
from millpond.kernels.merge.slots import merge_slots

__all__ = [
    "absolute_sums",
    "admit",
    "attend",
    "decode",
    "decode_rows",
    "merge_slots",
    "newest_alike",
    "prefill",
    "read",
    "read_packed",
    "window_signal",
    "write",
    "write_packed",
]
