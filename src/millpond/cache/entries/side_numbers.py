"""Numbers that lie in pages besides keys and values: positions and scores."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.pages import Arenas


def gather(arrays: Arenas, pages: Tensor, numbers: list[Tensor]) -> Tensor:
    """(H, n * slots): `numbers`, positions or scores by arena, of pages (H, n), which exist."""
    pages = pages.long()
    arena, row = pages // arrays.pages_per_arena, pages % arrays.pages_per_arena
    found = torch.empty(*pages.shape, arrays.slots, dtype=numbers[0].dtype, device=pages.device)
    for number, memory in enumerate(numbers):
        chosen = arena == number
        found[chosen] = memory[row[chosen]]
    return found.flatten(1)
