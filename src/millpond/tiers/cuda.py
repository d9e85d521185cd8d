"""CUDA device of a loader: copies from pinned memory in a stream of their own, while kernels run."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from millpond.errors import DataError, OptionError
from millpond.tiers.buffers import Slot, aligned_buffer, aligned_up
from millpond.tiers.ledger import Tier

#: Bytes that are copied to learn how fast the link and the device's memory are, and how often.
_PROBE_BYTES, _PROBES = 64 << 20, 4


class Bandwidths(NamedTuple):
    """Bytes per second: of the link from pinned memory, and of reads on the device."""

    link: float
    memory: float


class CudaCopy:
    """Copy whose end an event of the copy stream marks."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """Whether `finish` returns at once."""
        return bool(self._event.query())

    def finish(self) -> DataError | None:
        """Wait on the host until the bytes are on the device."""
        self._event.synchronize()
        return None


class CudaDevice:
    """One GPU that a loader copies to.

    Args:
        where: "cuda" or "cuda:1".
        capacity_bytes: Bytes of its memory that may be used; None for no limit.
        cuda: Module that gives streams and events; tests pass their own.

    Attributes:
        bytes_copied: Bytes copied to it so far.
    """

    def __init__(self, where: torch.device, capacity_bytes: int | None = None, *, cuda: Any = torch.cuda) -> None:
        self.where = where
        self.tier = Tier("device", "device", capacity_bytes)
        self.bytes_copied = 0
        self._cuda = cuda
        self._copies = cuda.Stream(where)
        self._lock = threading.Lock()
        self._fences: dict[int, Any] = {}
        self._pinned: list[Tensor] = []

    def buffer(self, nbytes: int) -> Tensor:
        """Return (n,) uint8 on the device, n the next multiple of `ALIGNMENT`."""
        return torch.empty(aligned_up(nbytes), dtype=torch.uint8, device=self.where)

    def pin(self, source: Tensor) -> None:
        """Lock the pages of `source` in the host's memory.

        Raises:
            OptionError: the system does not let them be locked.
        """
        code = self._cuda.cudart().cudaHostRegister(source.data_ptr(), source.numel(), 0)
        if int(code):
            raise OptionError(
                f"{source.numel():,} bytes of the host's memory cannot be pinned for copies to {self.where} (CUDA "
                f"error {int(code)}); lower memory=, or raise the limit of locked memory (ulimit -l)"
            )
        self._pinned.append(source)

    def fence(self, slot: Slot) -> None:
        """Let the next copy to this slot wait for kernels launched before, which may read it."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self.where))
        with self._lock:
            self._fences[id(slot)] = event

    def copy(self, source: Tensor, slot: Slot, place: int = 0) -> CudaCopy:
        """Begin to copy bytes of the host to `place` in a slot; running kernels are not held up."""
        with self._lock:
            fence = self._fences.get(id(slot))
            self.bytes_copied += len(source)
        with self._cuda.stream(self._copies):
            if fence is not None:
                self._copies.wait_event(fence)
            slot.data[place : place + len(source)].copy_(source, non_blocking=True)
            done = self._cuda.Event()
            done.record(self._copies)
        return CudaCopy(done)

    def measure(self) -> Bandwidths:
        """Return the bandwidths of its link and of its memory, measured in some milliseconds."""
        source, slot = aligned_buffer(_PROBE_BYTES), Slot(self.buffer(_PROBE_BYTES))
        twin = self.buffer(_PROBE_BYTES)
        self.pin(source)
        times: list[tuple[float, float]] = []
        for _ in range(_PROBES):
            began = time.perf_counter()
            self.copy(source, slot).finish()
            between = time.perf_counter()
            twin.copy_(slot.data)
            self._cuda.synchronize(self.where)
            times.append((between - began, time.perf_counter() - between))
        self._unpin(self._pinned.pop())
        self.bytes_copied -= _PROBES * _PROBE_BYTES
        link, copied = (_PROBE_BYTES / min(column) for column in zip(*times, strict=True))
        return Bandwidths(link, 2 * copied)  # a copy reads and writes

    def close(self) -> None:
        """End the copies, and unpin memory; a second call changes nothing."""
        self._copies.synchronize()
        while self._pinned:
            self._unpin(self._pinned.pop())
        self._fences.clear()

    def _unpin(self, source: Tensor) -> None:
        self._cuda.cudart().cudaHostUnregister(source.data_ptr())
