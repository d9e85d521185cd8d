"""The op set in plain torch: slow, short, and the truth that every other implementation is held to.

Shapes and meaning of every argument: see `ops`. Arithmetic runs in float32, in float64 where the pages are float64.
"""

from __future__ import annotations

from millpond.kernels.eager.attend import attend
from millpond.kernels.eager.decode import decode
from millpond.kernels.eager.pages import read, write
from millpond.kernels.eager.prefill import prefill, window_signal
from millpond.kernels.eager.scan import absolute_sums, newest_alike

__all__ = ["absolute_sums", "attend", "decode", "newest_alike", "prefill", "read", "window_signal", "write"]
