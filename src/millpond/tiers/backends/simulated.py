"""A simulated device: host memory with a capacity, which only copies of its own thread reach, at a bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from millpond.tiers.aligned import aligned_buffer
from millpond.tiers.backends.threads import ThreadBackend
from millpond.tiers.loader import Backend, Errand
from millpond.tiers.slots import Slot
from millpond.tiers.tier import Tier


class SimulatedDevice:
    """What stands for an accelerator where there is none: what is computed from must be copied there first.

    It shows that copies, their order and the reuse of slots are right; it says nothing of the speed of a device.

    Args:
        capacity_bytes: of its memory; None: no limit. bytes_per_s: of copies; None: as fast as the host's memory.
        backend: who copies; None: one thread.

    Attributes:
        bytes_copied: to it, so far.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        bytes_per_s: float | None = None,
        backend: Backend | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.tier = Tier("device", "device", capacity_bytes)
        self.where = torch.device("cpu")
        self.bytes_copied = 0
        self._bytes_per_s, self._sleep = bytes_per_s, sleep
        self._backend = backend or ThreadBackend()

    def buffer(self, nbytes: int) -> Tensor:
        """(n,) uint8."""
        return aligned_buffer(nbytes)

    def pin(self, source: Tensor) -> None:
        """Nothing: all memory is the host's."""

    def fence(self, slot: Slot) -> None:
        """Nothing: who releases a slot has computed with it."""

    def copy(self, source: Tensor, slot: Slot, place: int = 0) -> Errand:
        """Begin to copy bytes (n,) uint8 of the host to a place in a slot of the device; `source` stays as it is."""

        def task() -> None:
            began = time.perf_counter()
            slot.data[place : place + len(source)] = source
            if self._bytes_per_s is not None:
                self._sleep(max(0.0, len(source) / self._bytes_per_s - (time.perf_counter() - began)))

        self.bytes_copied += len(source)
        errand = Errand(task)
        self._backend.submit(id(slot), errand.run)
        return errand

    def close(self) -> None:
        """End its thread."""
        self._backend.close()
