"""State of a worker: the queries and sums that events need, and the events themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from millpond import Policy
from millpond.plugins import AttentionShape
from millpond_vllm.attention_sums import AttentionSums
from millpond_vllm.cache_layout import CacheLayout, dtype_of_bytes
from millpond_vllm.messages import Eviction, StepOrders
from millpond_vllm.null_blocks import NullBlocks, RowRequests
from millpond_vllm.planning import Competition, kept_columns, plans_layers_together
from millpond_vllm.recent_queries import RecentQueries

#: Bytes of keys and values that are gathered at once: layers are planned in groups of as many as fit.
GATHERED = 256 * 2**20


@dataclass(frozen=True, slots=True)
class EvictingLayer:
    """One attention layer of a worker.

    Attributes:
        index: Its place among the layers that evict.
        module: vLLM's layer, which holds its cache.
        n_heads: Query heads of this worker.
        n_kv_heads: KV heads of this worker.
        shape: Scale and soft cap.
        output: (Hq * value_dim, hidden) float32: the projection behind it; None if the method does not read it.
    """

    index: int
    module: Any
    n_heads: int
    n_kv_heads: int
    shape: AttentionShape
    output: Tensor | None = None

    @property
    def cache(self) -> Tensor:
        """Blocks of the layer."""
        cache: Tensor = self.module.kv_cache
        return cache

    @property
    def bytes_as(self) -> torch.dtype | None:
        """Dtype of the cache's numbers of 8 bits; None for wider ones."""
        return dtype_of_bytes(str(self.module.kv_cache_dtype))

    def decoded(self, part: Literal["keys", "values"], stored: Tensor) -> Tensor:
        """Return keys or values (H, n, D) as scores read them: numbers of 8 bits are multiplied by their factor."""
        dtype = self.bytes_as
        if dtype is None:
            return stored
        scale: Tensor = self.module._k_scale if part == "keys" else self.module._v_scale
        return (stored.view(dtype).float() * scale.to(torch.float32)).to(self.module.dtype)

    def output_maps(self) -> Tensor:
        """Return (Hq, value_dim, hidden) float32: the map of each query head's output to the layer's."""
        assert self.output is not None, "the worker finds the projections for a method that reads them"
        return self.output.view(self.n_heads, -1, self.output.shape[1])


class WorkerState:
    """Queries, sums and positions of the requests of one worker.

    Args:
        policy: Policy of the engine.
        layers: Layers that evict.
        layout: Layout of their caches.
        block: Tokens of a block.
        row_requests: Returns the requests of a step's rows.
    """

    def __init__(
        self,
        policy: Policy,
        layers: list[EvictingLayer],
        layout: CacheLayout,
        block: int,
        row_requests: RowRequests = lambda step: None,
    ) -> None:
        self.policy = policy
        self.layers = layers
        self.layout = layout
        self.block = block
        self.queries = RecentQueries(policy.window, len(layers)) if policy.window else None
        self.sums = AttentionSums(layers, layout, block, policy) if policy.observes_all else None
        self.nulls = NullBlocks(block, row_requests)
        self._positions: dict[str, Tensor] = {}  # of packed entries, (L, Hkv, n) int32
        self._together = plans_layers_together(policy)

    # ------------------------------------------------------------------ steps

    @torch.inference_mode()
    def begin(self, orders: StepOrders) -> None:
        """Take the orders of a step, and carry out its events before any block is written."""
        for eviction in orders.evictions:
            self._evict(eviction)
        self.nulls.take(orders.evictions)
        if self.queries is not None:
            self.queries.expect(orders.observations)

    def forget(self, requests: set[str]) -> None:
        """Drop the state of requests that ended or were preempted."""
        self.nulls.forget(requests)
        for request in requests:
            self._positions.pop(request, None)
            if self.queries is not None:
                self.queries.forget(request)

    # ------------------------------------------------------------------ events

    def _evict(self, eviction: Eviction) -> None:
        device = self.layers[0].cache.device
        source = torch.tensor(eviction.source, dtype=torch.long, device=device)
        tail = torch.tensor(eviction.tail, dtype=torch.long, device=device)
        target = torch.tensor(eviction.target, dtype=torch.long, device=device)
        positions = self._source_positions(eviction)
        kept = []
        for layers in self._groups(len(source) + len(tail)):
            kept.append(self._evict_layers(layers, eviction, source, tail, target, positions))
        self._positions[eviction.request] = torch.cat(kept)

    def _groups(self, n_blocks: int) -> list[list[EvictingLayer]]:
        """Return the layers that are planned together."""
        if not self._together:
            return [[layer] for layer in self.layers]
        cache = self.layers[0].cache
        size = n_blocks * cache[0].numel() * cache.element_size()
        width = max(1, GATHERED // size)
        groups: list[list[EvictingLayer]] = []
        for layer in self.layers:
            alike = groups and _kind(groups[-1][0]) == _kind(layer)
            if alike and len(groups[-1]) < width:
                groups[-1].append(layer)
            else:
                groups.append([layer])
        return groups

    def _source_positions(self, eviction: Eviction) -> Tensor:
        """Return (L, Hkv, N) int32: positions of all entries of a request, in the order of its blocks."""
        heads = self.layers[0].n_kv_heads
        device = self.layers[0].cache.device
        first = eviction.left_before * self.block
        plain = torch.arange(first, eviction.computed, dtype=torch.int32, device=device)
        plain = plain.expand(len(self.layers), heads, len(plain))
        if not eviction.left_before:
            return plain
        return torch.cat([self._positions[eviction.request], plain], 2)

    def _evict_layers(
        self,
        layers: list[EvictingLayer],
        eviction: Eviction,
        source: Tensor,
        tail: Tensor,
        target: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Pack the kept entries of some layers; return their positions (layers, Hkv, n)."""
        first, width = layers[0].index, layers[0].n_kv_heads
        n_compete = len(source) * self.block
        n = positions.shape[2]
        blocks = torch.cat([source, tail])
        read = [self.layout.read(layer.cache, blocks) for layer in layers]
        keys = torch.cat([one[0] for one in read])
        values = torch.cat([one[1] for one in read])
        seen = keys, values
        if layers[0].bytes_as is not None:
            pairs = list(zip(layers, read, strict=True))
            seen = (
                torch.cat([layer.decoded("keys", one[0]) for layer, one in pairs]),
                torch.cat([layer.decoded("values", one[1]) for layer, one in pairs]),
            )
        del read
        own = positions[first : first + len(layers)].reshape(len(layers) * width, n)
        given = Competition(
            seen[0][:, :n],
            seen[1][:, :n],
            own,
            n_compete,
            eviction.computed,
            first,
            None if self.sums is None else self.sums.of(layers, blocks)[:, :n],
            None if self.queries is None else self.queries.last(eviction.request, eviction.computed, layers),
            lambda: torch.cat([layer.output_maps() for layer in layers]),
        )
        n_keep = len(target) * self.block
        columns = kept_columns(self.policy, given, n_keep, _shape_of(layers), sinks=eviction.sinks, spans=eviction.keep)
        for row, layer in enumerate(layers):
            heads = slice(row * width, (row + 1) * width)
            index = columns[heads, :, None].expand(-1, -1, keys.shape[2])
            self.layout.write(layer.cache, target, keys[heads].gather(1, index), values[heads].gather(1, index))
        if self.sums is not None:
            self.sums.move(layers, blocks, target, columns)
        return own.gather(1, columns).view(len(layers), width, n_keep)


def _kind(layer: EvictingLayer) -> tuple[Any, ...]:
    """Return what layers that are planned together have in common; sinks of each are taken one behind the other."""
    shape = layer.shape
    attention = shape.scale, shape.softcap, shape.sink_logits is None
    return attention, layer.n_heads, layer.n_kv_heads, layer.cache.shape[1:], layer.bytes_as


def _shape_of(layers: list[EvictingLayer]) -> AttentionShape:
    """Return the attention of layers of one kind, whose query heads follow each other."""
    sinks = [layer.shape.sink_logits for layer in layers if layer.shape.sink_logits is not None]
    return replace(layers[0].shape, sink_logits=torch.cat(sinks) if sinks else None)
