"""Copies between the host and a device for which nothing waits, until what came back is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def shares_memory(device: torch.device) -> bool:
    """Return whether the host sees what is written on a device.

    Where it does, `on_device` copies nothing.
    """
    return device.type == "cpu"


def on_device(source: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Return numbers of the host on a device, for work that is launched after.

    The host goes on at once; a plain `.to(device)` waits for all work that was launched before. On the CPU the result
    is the source itself, in the same memory; elsewhere it is a copy of what the source holds now.
    """
    tensor = torch.from_numpy(source) if isinstance(source, np.ndarray) else source
    if tensor.is_cuda or device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


#: Bytes at whose multiples the arrays of one copy begin, so that kernels read them as those of copies of their own.
ALIGNMENT = 16


def send(parts: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return arrays of one type on a device, in the memory of one copy, see `on_device`."""
    grain = max(ALIGNMENT // parts[0].itemsize, 1)
    begins = np.cumsum([0, *(-(-part.size // grain) * grain for part in parts)])
    packed = np.zeros(int(begins[-1]), dtype=parts[0].dtype)
    for part, begin in zip(parts, begins, strict=False):
        packed[begin : begin + part.size] = part.ravel()
    there = on_device(packed, device)
    return [
        there[begin : begin + part.size].view(part.shape) for part, begin in zip(parts, begins.tolist(), strict=False)
    ]


class ReadBack:
    """Tensors on their way to the host, behind the work that was launched before.

    Args:
        tensors: Tensors of one device; nobody may write to them before they were read.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._event: Any = None
        device = self._tensors[0].device
        if device.type == "cuda":
            with torch.cuda.device(device):
                pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self._tensors]
                for to, tensor in zip(pinned, self._tensors, strict=True):
                    to.copy_(tensor, non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()
            self._tensors = pinned

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host, once the work before them is done.

        Later work is not waited for.
        """
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return [tensor.cpu() for tensor in self._tensors]
