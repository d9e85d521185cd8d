"""Attention that each entry has gathered, beside the blocks, for methods of accumulated attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millpond import Policy
from millpond.plugins import BlockSumsArgs, PrefillArgs, Reduce, WindowSignalArgs, block_sums, prefill, window_signal
from millpond_vllm.block_numbers import BlockNumbers

if TYPE_CHECKING:
    from millpond_vllm.cache_layout import CacheLayout
    from millpond_vllm.messages import StepPart
    from millpond_vllm.worker_state import EvictingLayer


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one request in a step.

    Attributes:
        begin: Row of its first query.
        end: Row behind its last one.
        length: Entries of the request, those of this step among them.
        blocks: (n,) int64, its blocks.
    """

    begin: int
    end: int
    length: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class StepSums:
    """What the queries of a step add to, the same in all layers.

    Attributes:
        rows: (S,) row of each request's first query; None where row i is that of request i.
        table: (S, M) int32 blocks.
        lens: (S,) int32 entries of each request that brings one query, 0 for the others; None if none brings one.
        chunks: Requests that bring several.
    """

    rows: Tensor | None
    table: Tensor
    lens: Tensor | None
    chunks: list[Chunk]


class AttentionSums(BlockNumbers):
    """Sums of the attention that each entry has gathered.

    Args:
        layers: Layers that evict.
        layout: Layout of their caches.
        block: Tokens of a block.
        policy: Policy of the engine.
    """

    def __init__(self, layers: list[EvictingLayer], layout: CacheLayout, block: int, policy: Policy) -> None:
        super().__init__(layers, block)
        self._layout = layout
        self._reduce = Reduce[policy.reduce.upper()]
        self._decay = policy.decay
        self._expected: list[StepPart] = []

    def expect(self, parts: list[StepPart]) -> None:
        """Take the requests of this step that an event is ahead of; nothing is summed for others."""
        self._expected = parts

    def plan(self, given: Any) -> StepSums | None:
        """Return what a step adds to; None if no event is ahead of any request.

        Args:
            given: vLLM's common metadata of the step, with rows and lengths without null blocks.
        """
        if not self._expected:
            return None
        starts, lengths, table = given.query_start_loc, given.seq_lens, given.block_table_tensor
        slots = given.slot_mapping
        wanted = torch.tensor([part.slot for part in self._expected], dtype=slots.dtype, device=slots.device)
        counts = starts.diff()
        rows = starts[:-1].long().clamp(max=max(given.num_actual_tokens - 1, 0))  # padding begins behind the tokens
        summed = torch.isin(slots[rows], wanted) & (counts > 0)
        if given.max_query_len == 1:
            whole = len(counts) == given.num_actual_tokens  # no padding
            return StepSums(None if whole else rows, table, torch.where(summed, lengths, 0).int(), [])
        chunks = []
        for row in (summed & (counts > 1)).nonzero()[:, 0].tolist():
            length = int(lengths[row])
            blocks = table[row, : -(-length // self._block)].long()
            chunks.append(Chunk(int(starts[row]), int(starts[row + 1]), length, blocks))
        single = summed & (counts == 1)
        lens = torch.where(single, lengths, 0).int() if bool(single.any()) else None
        return StepSums(rows, table, lens, chunks)

    def gather(self, layer: EvictingLayer, queries: Tensor, step: StepSums) -> None:
        """Add the attention of a step's queries (T, Hq, D) to the entries that they see."""
        sums = self.at(layer)
        if step.lens is not None:
            q = queries[: len(step.lens)] if step.rows is None else queries[step.rows]
            keys, order = self._layout.keys(layer.cache)
            numbers = (layer.shape, self._reduce, self._decay)
            block_sums(BlockSumsArgs(q, keys, order, step.table, step.lens, sums, *numbers))
        for chunk in step.chunks:
            self._add_chunk(sums, layer, queries[chunk.begin : chunk.end], chunk)

    def _add_chunk(self, sums: Tensor, layer: EvictingLayer, queries: Tensor, chunk: Chunk) -> None:
        """Add the attention of several queries (n, Hq, D) of one request; its n newest entries begin at 0."""
        past, length, n_blocks = chunk.length - len(queries), chunk.length, len(chunk.blocks)
        keys = self._layout.read_keys(layer.cache, chunk.blocks)[:, :length].to(queries.dtype)
        q = queries.transpose(0, 1).contiguous()
        received = self._received(layer, q, keys, past)
        total = sums[chunk.blocks].transpose(0, 1).reshape(len(keys), n_blocks * self._block)
        total[:, past:length] = 0
        if self._decay != 1:
            total *= self._decay ** len(queries)
        total[:, :length] += received
        sums[chunk.blocks] = total.view(len(keys), n_blocks, self._block).transpose(0, 1)

    def _received(self, layer: EvictingLayer, q: Tensor, keys: Tensor, past: int) -> Tensor:
        """Return (Hkv, N) float32: what queries (Hq, n, D) pay to the keys (Hkv, N, D), their own among them."""
        at = torch.arange(keys.shape[1], dtype=torch.int32, device=q.device)
        if self._decay == 1:  # one pass over the keys for the denominators, one for the sums, and no values
            positions = at.expand(len(keys), -1)
            return window_signal(WindowSignalArgs(q, keys, at[past:], positions, layer.shape, self._reduce))
        before = at[None, :past] if past else None
        args = PrefillArgs(q, keys, keys, at[past:], layer.shape, before, None, self._reduce, self._decay)
        received = prefill(args).colsum
        assert received is not None
        return received
