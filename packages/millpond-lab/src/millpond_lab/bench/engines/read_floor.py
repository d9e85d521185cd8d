"""The lower bound of a decoding step: reading weights and kept entries once, on the threads of the engines."""

from __future__ import annotations

import statistics
import time

import torch

from millpond.kernels import native

READINGS = 5  #: of which the median counts


class Floor:
    """A buffer to read with as many threads as the engines have. It grows to the largest read."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read_ms(self, n_bytes: int) -> float | None:
        """Milliseconds in which `n_bytes` are read; None where there are no native kernels to read with."""
        if not native.is_available():
            return None
        if len(self._memory) < n_bytes:
            self._memory = torch.ones(n_bytes, dtype=torch.uint8)
            native.use_huge_pages([self._memory])
        times = []
        for _ in range(READINGS):
            start = time.perf_counter()
            native.read_bandwidth(self._memory.data_ptr(), n_bytes, self._threads)
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
