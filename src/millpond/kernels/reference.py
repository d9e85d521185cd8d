"""Op set in plain torch: slow and short, the reference for every other implementation.

Meaning is that of `OpSet`, shapes those of `kernels.args`. Arithmetic runs in float32, in float64 if the pages are
float64.
"""

from __future__ import annotations

from millpond.kernels.eager.attention import absolute_sums, attend, newest_alike, prefill, window_signal, window_sums
from millpond.kernels.eager.block_sums import block_sums
from millpond.kernels.eager.decode import admit, decode_rows, decode_shared
from millpond.kernels.eager.decode import decode_packed as decode
from millpond.kernels.eager.packed_pages import read_packed, write_packed
from millpond.kernels.eager.pages import read, read_scores, write
from millpond.kernels.eager.selection import best_columns, move_entries, shared_counts
from millpond.kernels.merge.reference import merge_slots
