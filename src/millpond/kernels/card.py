"""The card of a CUDA device: its name, what it can compute, and the memory that it has free."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

#: Compute capability from which a card has bfloat16.
BFLOAT16_CAPABILITY = (8, 0)


class Card(NamedTuple):
    """A CUDA device now.

    Attributes:
        name: Name of the card.
        capability: Compute capability, major and minor.
        free_bytes: Bytes that this process can still take, those that torch keeps for later use among them.
        total_bytes: Bytes of its memory.
    """

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, device: torch.device, cuda: Any = torch.cuda) -> Card:
        """Ask a device.

        Args:
            device: The device.
            cuda: Module that knows it; tests pass their own.
        """
        properties = cuda.get_device_properties(device)
        free, total = cuda.mem_get_info(device)
        kept = cuda.memory_reserved(device) - cuda.memory_allocated(device)
        return cls(str(properties.name), (int(properties.major), int(properties.minor)), int(free + kept), int(total))

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"
