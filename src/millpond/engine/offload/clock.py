"""Clock for what is computed in a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def computing_clock() -> Callable[[], float]:
    """Seconds: of this thread where it computes alone, so that other processes do not lengthen them; else of the wall.

    What several threads compute is waited for by the calling one, whose own time says nothing then.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
