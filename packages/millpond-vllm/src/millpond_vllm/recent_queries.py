"""The last queries of requests in front of their next event, seen by their places in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millpond_vllm.messages import Observation

if TYPE_CHECKING:
    from millpond_vllm.worker_state import EvictingLayer


class RecentQueries:
    """Queries of each request, the newest `window` of them, in all layers.

    Query t lies in row t % window, so that chunks of any length fill one buffer.

    Args:
        window: Queries that an event needs.
        n_layers: Layers that evict.
    """

    def __init__(self, window: int, n_layers: int) -> None:
        self._window = window
        self._n_layers = n_layers
        self._kept: dict[str, list[Tensor | None]] = {}
        self._expected: list[Observation] = []

    def expect(self, observations: list[Observation]) -> None:
        """Take the queries that this step has to bring."""
        self._expected = observations

    def rows(self, slots: Tensor) -> Tensor | None:
        """Return the rows of a step's queries that are expected, found by the places (T,) of its tokens.

        A place belongs to one request and position, so neither order nor ids of the batch matter. None if no query of
        this step is expected.
        """
        if not self._expected:
            return None
        wanted = [slot for one in self._expected for slot in one.slots]
        places = torch.tensor(wanted, dtype=slots.dtype, device=slots.device)
        order = slots.argsort()
        return order[torch.searchsorted(slots[order], places)]

    def remember(self, layer: int, queries: Tensor, rows: Tensor) -> None:
        """Keep the expected queries of one layer: queries (T, Hq, D) of the step, and their rows."""
        found, begin = queries[rows], 0
        for one in self._expected:
            part = found[begin : begin + len(one.slots)]
            begin += len(one.slots)
            layers = self._kept.setdefault(one.request, [None] * self._n_layers)
            kept = layers[layer]
            if kept is None:
                layers[layer] = kept = part.new_zeros(self._window, *part.shape[1:])
            at = torch.arange(one.first, one.first + len(part), device=part.device) % self._window
            kept[at] = part

    def last(self, request: str, computed: int, layers: list[EvictingLayer]) -> Tensor:
        """Return (Hq * layers, W, D): the last queries before `computed` tokens, in their order."""
        kept = self._kept[request]
        width = min(self._window, computed)
        own = [kept[layer.index] for layer in layers]
        assert all(part is not None for part in own), "every layer remembers the queries in front of an event"
        at = torch.arange(computed - width, computed, device=own[0].device) % self._window  # type: ignore[union-attr]
        return torch.cat([part[at].transpose(0, 1) for part in own if part is not None])

    def forget(self, request: str) -> None:
        """Drop the queries of a request."""
        self._kept.pop(request, None)
