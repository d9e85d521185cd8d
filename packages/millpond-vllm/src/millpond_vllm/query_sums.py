"""Moments of all queries of requests, for methods that expect later queries to be like them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millpond import Policy
from millpond.plugins import QueryMoments

if TYPE_CHECKING:
    from millpond_vllm.messages import StepPart
    from millpond_vllm.worker_state import EvictingLayer

#: Queries of a layer that are gathered before they are summed: a step of decoding brings one of each request.
GATHERED = 256
#: Queries that are summed in float32 at a time.
BLOCK = 64


@dataclass(slots=True, eq=False)
class StepQueries:
    """Queries of a step that are summed, the same in all layers.

    Attributes:
        rows: (n,) int64, their rows in the step.
        positions: (n,) int64.
        requests: Request of each run of them, None for one that was forgotten since; and how many they are.
    """

    rows: Tensor
    positions: Tensor
    requests: list[tuple[str | None, int]]


class QuerySums:
    """Moments of the queries of each request in each layer, without those at the sinks.

    Args:
        layers: Layers that evict.
        policy: Policy of the engine.
    """

    def __init__(self, layers: list[EvictingLayer], policy: Policy) -> None:
        self._sinks = policy.protect.sinks
        self._before_rope = policy.needs_unrotated_queries
        self._pending: list[list[tuple[Tensor, StepQueries]]] = [[] for _ in layers]
        self._moments: list[dict[str, QueryMoments]] = [{} for _ in layers]
        self._expected: list[StepPart] = []

    def expect(self, parts: list[StepPart]) -> None:
        """Take the requests of this step that an event is ahead of; nothing is summed for others."""
        self._expected = parts

    def plan(self, slots: Tensor) -> StepQueries | None:
        """Return the queries that are summed of a step with tokens at places (T,); None if there are none."""
        skipped = [max(0, self._sinks - part.first) for part in self._expected]
        parts = [(part, skip) for part, skip in zip(self._expected, skipped, strict=True) if skip < part.count]
        if not parts:
            return None
        device = slots.device
        order = slots.argsort()
        wanted = torch.tensor([part.slot for part, _ in parts], dtype=slots.dtype, device=device)
        begins = order[torch.searchsorted(slots[order], wanted)]  # a request's tokens lie together
        counts = [part.count - skip for part, skip in parts]
        offsets = torch.cat([torch.arange(skip, part.count) for part, skip in parts]).to(device)
        firsts = torch.tensor([part.first for part, _ in parts]).repeat_interleave(torch.tensor(counts)).to(device)
        rows = begins.repeat_interleave(torch.tensor(counts, device=device), output_size=sum(counts)) + offsets
        named: list[str | None] = [part.request for part, _ in parts]
        return StepQueries(rows, firsts + offsets, list(zip(named, counts, strict=True)))

    def gather(self, layer: EvictingLayer, queries: Tensor, step: StepQueries) -> None:
        """Take a step's queries (T, Hq, D) of one layer."""
        pending = self._pending[layer.index]
        pending.append((queries[step.rows], step))
        if sum(len(part) for part, _ in pending) >= GATHERED:
            self._fold(layer)

    def moments(self, request: str, layer: EvictingLayer) -> QueryMoments:
        """Return the moments of a request's queries so far."""
        self._fold(layer)
        found = self._moments[layer.index].get(request)
        if found is None:  # all of its queries are at the sinks
            dim = layer.module.head_size
            return QueryMoments.of(torch.zeros(layer.n_heads, 0, dim, device=layer.cache.device))
        return found

    def forget(self, request: str) -> None:
        """Drop the queries of a request."""
        for moments in self._moments:
            moments.pop(request, None)
        for pending in self._pending:
            for _, step in pending:
                step.requests = [(None if name == request else name, n) for name, n in step.requests]

    def _fold(self, layer: EvictingLayer) -> None:
        """Add the gathered queries of a layer to the moments of their requests."""
        pending, self._pending[layer.index] = self._pending[layer.index], []
        if not pending:
            return
        queries = torch.cat([part for part, _ in pending]).transpose(0, 1)  # (Hq, n, D)
        if self._before_rope and layer.rotation is not None:
            positions = torch.cat([step.positions for _, step in pending])
            queries = layer.rotation.rotate(queries[None], positions[None], inverse=True)[0]
        rows: dict[str, list[Tensor]] = {}
        begin = 0
        for _, step in pending:
            for name, count in step.requests:
                if name is not None:
                    rows.setdefault(name, []).append(queries[:, begin : begin + count])
                begin += count
        moments = self._moments[layer.index]
        for name, own in rows.items():
            for part in torch.split(torch.cat(own, 1), BLOCK, 1):
                more = QueryMoments.of(part)
                moments[name] = moments[name] + more if name in moments else more
