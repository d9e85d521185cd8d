"""Memory as the operating system and the buffers see it: measured, never computed from shapes."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from millpond.tiers import free_memory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the buffers behind some tensors, each buffer once, unused room included."""
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(buffers.values())


def give_back() -> None:
    """Return what is free to the operating system, so that a later peak is not hidden in reused memory (glibc)."""
    gc.collect()
    free_memory.give_back()


class PeakMemory:
    """The process's peak resident memory above what it held at the start. Linux; elsewhere `growth` is None."""

    def __init__(self) -> None:
        give_back()
        self._before = _status("VmRSS")
        try:
            _CLEAR.write_text("5")  # resets VmHWM to the current VmRSS
        except OSError:
            self._before = None

    def growth(self) -> int | None:
        """Bytes of the highest point so far above the start."""
        peak = _status("VmHWM")
        return None if self._before is None or peak is None else max(0, peak - self._before)


def resident_bytes() -> int | None:
    """The process's resident memory now; None where the system does not tell."""
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
