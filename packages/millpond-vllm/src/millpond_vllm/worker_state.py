"""State of a worker: the queries and sums that events need, and the events themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from millpond import Policy
from millpond.plugins import AttentionShape, QueryMoments
from millpond_vllm.attention_sums import AttentionSums, StepSums
from millpond_vllm.block_numbers import BlockNumbers
from millpond_vllm.cache_layout import CacheLayout, dtype_of_bytes
from millpond_vllm.entry_scores import EntryScores, StepTokens
from millpond_vllm.messages import Eviction, StepOrders
from millpond_vllm.null_blocks import NullBlocks, RowRequests
from millpond_vllm.planning import Competition, kept_columns, plans_layers_together
from millpond_vllm.query_sums import QuerySums, StepQueries
from millpond_vllm.recent_queries import RecentQueries
from millpond_vllm.rotation import HeadRotation

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
        number: Its number in the whole model.
        shape: Scale and soft cap.
        projection: Returns the projection behind it, (Hq * value_dim, hidden) float32.
        rotation: How it rotates its queries; None if it does not, or if the method does not ask.
    """

    index: int
    module: Any
    n_heads: int
    n_kv_heads: int
    number: int
    shape: AttentionShape
    projection: Callable[[], Tensor]
    rotation: HeadRotation | None = None

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
        projection = self.projection()
        return projection.view(self.n_heads, -1, projection.shape[1])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the queries of a step bring; None for nothing.

    Attributes:
        rows: Rows of the queries that a later event needs.
        sums: Entries whose attention is summed.
        moments: Queries whose moments are summed.
        tokens: Tokens that are scored.
    """

    rows: Tensor | None
    sums: StepSums | None
    moments: StepQueries | None
    tokens: StepTokens | None

    @property
    def brings(self) -> bool:
        """Whether there is anything to take."""
        return any(part is not None for part in (self.rows, self.sums, self.moments, self.tokens))


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
        self.moments = QuerySums(layers, policy) if policy.sums_queries else None
        self.scores = EntryScores(layers, block, policy) if policy.scores_entries else None
        self._beside: BlockNumbers | None = self.scores if self.sums is None else self.sums
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
        if self.sums is not None:
            self.sums.expect(orders.parts)
        if self.moments is not None:
            self.moments.expect(orders.parts)

    def plan_step(self, given: Any, lengths: Tensor) -> StepPlan | None:
        """Return what the queries of a step bring, the same in all layers; None if they bring nothing.

        Args:
            given: vLLM's common metadata of the step, with rows and lengths without null blocks.
            lengths: (S,) lengths with them.
        """
        slots = given.slot_mapping[: given.num_actual_tokens]
        plan = StepPlan(
            None if self.queries is None else self.queries.rows(slots),
            None if self.sums is None else self.sums.plan(given),
            None if self.moments is None else self.moments.plan(slots),
            None if self.scores is None else self.scores.plan(given, lengths),
        )
        return plan if plan.brings else None

    @torch.inference_mode()
    def observe(self, index: int, queries: Tensor, keys: Tensor, values: Tensor, step: StepPlan) -> None:
        """Take a step's queries (T, Hq, D), keys and values (T, Hkv, ...) of one layer; they are written."""
        layer = self.layers[index]
        if self.queries is not None and step.rows is not None:
            self.queries.remember(index, queries, step.rows)
        if self.sums is not None and step.sums is not None:
            self.sums.gather(layer, queries, step.sums)
        if self.moments is not None and step.moments is not None:
            self.moments.gather(layer, queries, step.moments)
        if self.scores is not None and step.tokens is not None:
            self.scores.write(layer, queries, keys, values, step.tokens)

    @torch.inference_mode()
    def check(self) -> None:
        """Plan once for each layer over random entries: what does not fit the model fails here, not in a request.

        Raises:
            MillpondError: the method cannot plan for a layer, such as with networks or filters of another model.
        """
        n = 4 * self.block
        for layer in self.layers:
            dim = layer.module.head_size
            make = torch.Generator().manual_seed(layer.number)

            def drawn(heads: int, tokens: int, dim: int = dim, make: torch.Generator = make) -> Tensor:
                return torch.randn(heads, tokens, dim, generator=make).to(self.layers[0].cache.device)

            keys, queries = drawn(layer.n_kv_heads, n), drawn(layer.n_heads, max(self.policy.window, 1))
            if self.scores is not None:
                first = torch.zeros(1, dtype=torch.long, device=keys.device)  # the null block
                query, key = queries[:, :1].transpose(0, 1), keys[:, :1].transpose(0, 1)
                self.scores.write(layer, query, key, key, StepTokens(first, first))
            given = Competition(
                keys,
                keys.flip(1),
                torch.arange(n, dtype=torch.int32, device=keys.device).expand(len(keys), -1),
                3 * self.block,
                n,
                layer.number,
                keys.square().sum(2).float() if self._beside is not None else None,
                queries[:, -n:],
                layer.output_maps,
                QueryMoments.of(queries),
                None if layer.rotation is None else layer.rotation.rotate,
            )
            kept_columns(self.policy, given, self.block, layer.shape)

    def forget(self, requests: set[str]) -> None:
        """Drop the state of requests that ended or were preempted."""
        self.nulls.forget(requests)
        for request in requests:
            self._positions.pop(request, None)
            if self.queries is not None:
                self.queries.forget(request)
            if self.moments is not None:
                self.moments.forget(request)

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
            layers[0].number,
            None if self._beside is None else self._beside.of(layers, blocks)[:, :n],
            None if self.queries is None else self.queries.last(eviction.request, eviction.computed, layers),
            lambda: torch.cat([layer.output_maps() for layer in layers]),
            None if self.moments is None else self.moments.moments(eviction.request, layers[0]),
            None if layers[0].rotation is None else layers[0].rotation.rotate,
        )
        n_keep = len(target) * self.block
        columns = kept_columns(self.policy, given, n_keep, _shape_of(layers), sinks=eviction.sinks, spans=eviction.keep)
        for row, layer in enumerate(layers):
            heads = slice(row * width, (row + 1) * width)
            index = columns[heads, :, None].expand(-1, -1, keys.shape[2])
            self.layout.write(layer.cache, target, keys[heads].gather(1, index), values[heads].gather(1, index))
        if self._beside is not None:
            self._beside.move(layers, blocks, target, columns)
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
