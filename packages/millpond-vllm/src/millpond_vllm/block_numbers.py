"""Numbers beside the entries of blocks, which live and die with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from millpond_vllm.worker_state import EvictingLayer


class BlockNumbers:
    """One number (blocks, Hkv, block size) float32 for each entry of each layer.

    Args:
        layers: Layers that evict.
        block: Tokens of a block.
    """

    def __init__(self, layers: list[EvictingLayer], block: int) -> None:
        self._block = block
        self._numbers: list[Tensor | None] = [None] * len(layers)

    def of(self, layers: list[EvictingLayer], blocks: Tensor) -> Tensor:
        """Return (G, n * block size) float32: the numbers of n blocks in order."""
        parts = [self.at(layer)[blocks].transpose(0, 1).flatten(1) for layer in layers]
        return torch.cat(parts)

    def move(self, layers: list[EvictingLayer], blocks: Tensor, target: Tensor, columns: Tensor) -> None:
        """Move the numbers of kept columns (G, n) of `blocks` to the packed blocks."""
        kept = self.of(layers, blocks).gather(1, columns)
        width = layers[0].n_kv_heads
        for row, layer in enumerate(layers):
            own = kept[row * width : (row + 1) * width].view(width, len(target), self._block)
            self.at(layer)[target] = own.transpose(0, 1)

    def at(self, layer: EvictingLayer) -> Tensor:
        """Return the numbers of a layer, made when the cache is there."""
        numbers = self._numbers[layer.index]
        if numbers is None:
            cache = layer.cache
            blocks = cache.shape[0] * cache.shape[2] // self._block  # a kernel's blocks may be smaller
            numbers = torch.zeros(blocks, layer.n_kv_heads, self._block, device=cache.device)
            self._numbers[layer.index] = numbers
        return numbers
