"""CUDA device of a loader: copies from pinned memory in a stream of their own, while kernels run."""

from __future__ import annotations

import threading
import time
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from millpond.errors import DataError, OptionError
from millpond.tiers.buffers import Slot, aligned_buffer, aligned_up
from millpond.tiers.ledger import Tier

#: Bytes that are copied to learn how fast the link and the device's memory are, and how often.
_PROBE_BYTES, _PROBES = 64 << 20, 4
#: Width of the products that are timed.
_PRODUCT_WIDTH = 4096
#: Least bytes of pinned memory that tensors pass on their way to and from a device.
_STAGE_BYTES = 1 << 20


class Bandwidths(NamedTuple):
    """Bytes per second of the link and of the device's memory, and FLOP per second.

    The link is read from pinned memory; products are in 16 bits.
    """

    link: float
    memory: float
    flops: float = 1e13


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


class _Stage:
    """Pinned memory of the host that tensors pass on their way to or from a device."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._event: Any = None

    def view_as(self, tensor: Tensor, place: int = 0) -> Tensor:
        """Return the memory from byte `place` on in the shape and dtype of a tensor."""
        return self.data[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def record(self, cuda: Any, where: torch.device) -> None:
        """Mark the end of a copy that was queued on the current stream."""
        self._event = cuda.Event()
        self._event.record(cuda.current_stream(where))

    def wait(self) -> None:
        """Wait on the host for the last copy."""
        if self._event is not None:
            self._event.synchronize()


class CudaDevice:
    """One GPU that a loader copies to.

    Args:
        where: "cuda" or "cuda:1".
        capacity_bytes: Bytes of its memory that may be used; None for no limit.
        cuda: Module that gives streams and events; tests pass their own.

    Attributes:
        bytes_copied: Bytes copied to it so far.
        bytes_down: Bytes of tensors that came down from it.
    """

    def __init__(self, where: torch.device, capacity_bytes: int | None = None, *, cuda: Any = torch.cuda) -> None:
        self.where = where
        self.tier = Tier("device", "device", capacity_bytes)
        self.bytes_copied = self.bytes_down = 0
        self._cuda = cuda
        self._copies = cuda.Stream(where)
        self._lock = threading.Lock()
        self._fences: dict[int, Any] = {}
        self._pinned: list[Tensor] = []
        self._stages: dict[str, _Stage] = {}

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

    def down(self, *tensors: Tensor) -> list[Tensor]:
        """Return copies of tensors of the device in the host's memory, by way of pinned memory.

        The host waits for the kernels before and for the copy, and for nothing that is queued after.
        """
        self.bytes_down += sum(tensor.nbytes for tensor in tensors)
        places = [0, *accumulate(aligned_up(tensor.nbytes) for tensor in tensors)]
        stage = self._stage("down", places[-1])
        pinned = [stage.view_as(tensor, place) for tensor, place in zip(tensors, places, strict=False)]
        for to, tensor in zip(pinned, tensors, strict=True):
            to.copy_(tensor, non_blocking=True)
        stage.record(self._cuda, self.where)
        stage.wait()
        return [to.clone() for to in pinned]

    def up(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host on the device, for kernels launched after."""
        self.bytes_copied += tensor.nbytes
        stage = self._stage("up", tensor.nbytes)
        stage.wait()  # the copy before has left the pinned memory
        pinned = stage.view_as(tensor)
        pinned.copy_(tensor)
        on_device = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.where)
        on_device.copy_(pinned, non_blocking=True)
        stage.record(self._cuda, self.where)
        return on_device

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
        return Bandwidths(link, 2 * copied, self._flops())  # a copy reads and writes

    def _flops(self) -> float:
        """Return the FLOP per second of large products in 16 bits."""
        n = _PRODUCT_WIDTH if self.where.type == "cuda" else _PRODUCT_WIDTH // 16
        matrix = torch.ones(n, n, dtype=torch.bfloat16, device=self.where)
        times: list[float] = []
        for _ in range(_PROBES):
            self._cuda.synchronize(self.where)
            began = time.perf_counter()
            torch.mm(matrix, matrix)
            self._cuda.synchronize(self.where)
            times.append(time.perf_counter() - began)
        return float(2 * n**3 / min(times))

    def close(self) -> None:
        """End the copies, and unpin memory; a second call changes nothing."""
        self._copies.synchronize()
        for stage in self._stages.values():
            stage.wait()
        self._stages.clear()
        while self._pinned:
            self._unpin(self._pinned.pop())
        self._fences.clear()

    def _stage(self, way: str, nbytes: int) -> _Stage:
        """Return the pinned memory of one way, of at least `nbytes`.

        A larger one takes the place of a small one.
        """
        stage = self._stages.get(way)
        if stage is None or len(stage.data) < nbytes:
            if stage is not None:
                stage.wait()
                self._pinned = [tensor for tensor in self._pinned if tensor is not stage.data]
                self._unpin(stage.data)
            stage = self._stages[way] = _Stage(aligned_buffer(max(nbytes, _STAGE_BYTES)))
            self.pin(stage.data)
        return stage

    def _unpin(self, source: Tensor) -> None:
        self._cuda.cudart().cudaHostUnregister(source.data_ptr())
