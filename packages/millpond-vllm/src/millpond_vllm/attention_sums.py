"""Attention that each entry has gathered, beside the blocks, for methods of accumulated attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millpond import Policy
from millpond.plugins import PrefillArgs, Reduce, prefill

if TYPE_CHECKING:
    from millpond_vllm.cache_layout import CacheLayout
    from millpond_vllm.worker_state import EvictingLayer


class AttentionSums:
    """Sums (blocks, Hkv, block size) float32 of each layer; they live and die with the entries of a block.

    Args:
        layers: Layers that evict.
        layout: Layout of their caches.
        block: Tokens of a block.
        policy: Policy of the engine.
    """

    def __init__(self, layers: list[EvictingLayer], layout: CacheLayout, block: int, policy: Policy) -> None:
        self._layout = layout
        self._block = block
        self._reduce = Reduce[policy.reduce.upper()]
        self._decay = policy.decay
        self._sums: list[Tensor | None] = [None] * len(layers)

    def of(self, layers: list[EvictingLayer], blocks: Tensor) -> Tensor:
        """Return (G, n * block size) float32: the sums of n blocks in order."""
        parts = [self._at(layer)[blocks].transpose(0, 1).flatten(1) for layer in layers]
        return torch.cat(parts)

    def move(self, layers: list[EvictingLayer], blocks: Tensor, target: Tensor, columns: Tensor) -> None:
        """Move the sums of kept columns (G, n) of `blocks` to the packed blocks."""
        kept = self.of(layers, blocks).gather(1, columns)
        width = layers[0].n_kv_heads
        for row, layer in enumerate(layers):
            own = kept[row * width : (row + 1) * width].view(width, len(target), self._block)
            self._at(layer)[target] = own.transpose(0, 1)

    def gather(self, layer: EvictingLayer, queries: Tensor, metadata: Any) -> None:
        """Add the attention of a step's queries (T, Hq, D) to the entries that they see."""
        sums, block = self._at(layer), self._block
        slots = metadata.slot_mapping[: metadata.num_actual_tokens]
        sums[slots // block, :, slots % block] = 0  # what was written in this step
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for request, length in enumerate(lengths):
            q = queries[starts[request] : starts[request + 1]]
            if not len(q):
                continue
            blocks = metadata.block_table[request, : -(-length // block)].long()
            keys = self._layout.read(layer.cache, blocks)[0][:, :length].to(q.dtype)
            at = torch.arange(length - len(q), length, dtype=torch.int32, device=q.device)
            past = torch.arange(length - len(q), dtype=torch.int32, device=q.device)[None] if length > len(q) else None
            args = PrefillArgs(
                q.transpose(0, 1).contiguous(), keys, keys, at, layer.shape, past, None, self._reduce, self._decay
            )
            received = prefill(args).colsum
            assert received is not None
            if self._decay != 1:
                sums[blocks] *= self._decay ** len(q)
            padded = torch.nn.functional.pad(received, (0, len(blocks) * block - length))
            sums[blocks] += padded.view(len(padded), len(blocks), block).transpose(0, 1)

    def _at(self, layer: EvictingLayer) -> Tensor:
        """Return the sums of a layer, made when the cache is there."""
        sums = self._sums[layer.index]
        if sums is None:
            cache = layer.cache
            sums = torch.zeros(cache.shape[0], layer.n_kv_heads, self._block, device=cache.device)
            self._sums[layer.index] = sums
        return sums
