"""Decoding steps of a batch through all layers, recorded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millpond.kernels import ops
from millpond.kernels.args import DecodeArgs, StepRegions
from millpond.kernels.cuda_graphs import GraphRecorder, StepInputs, key_of, same_key
from millpond.models.lean.block import Attend

#: Graphs that are kept, of other numbers of sequences, methods or pools.
MOST_GRAPHS = 8

#: Runs rows through all layers: forward(ids (S,), positions (S,), attend, rows (S,)) -> logits (S, vocabulary).
Forward = Callable[[Tensor, Tensor, Attend, Tensor], Tensor]


@dataclass(slots=True)
class _Graph:
    key: tuple[Any, ...]
    inputs: StepInputs
    ids: Tensor
    positions: Tensor
    replay: Callable[[], None]
    outputs: list[tuple[Tensor, Tensor]]  #: one: of the step that was recorded


class DecodeGraph:
    """Decoding steps of all layers, each sequence with one token.

    A step is recorded where the one before had as many sequences in the same pools under the same rules. It is replayed
    for such steps from then on, whatever their sequences are, until their page tables outgrow it.

    Args:
        forward: of the decoder. record: how a graph is made.

    Attributes:
        recorded, replayed: graphs that were made, and steps that they ran.
    """

    def __init__(self, forward: Forward, record: GraphRecorder) -> None:
        self._forward, self._record = forward, record
        self._seen: tuple[Any, ...] | None = None
        self._graphs: OrderedDict[int, _Graph] = OrderedDict()
        self.recorded = self.replayed = 0

    def step(self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions]) -> tuple[Tensor, Tensor]:
        """Logits (S, vocabulary) and log-sum-exp (layers, S, n_heads) of the newest token of each sequence.

        Args:
            ids, positions: (S,) of the tokens. regions: what each layer meets; written, as by `ops.decode`.
        """
        key = key_of(regions)
        alike = key is not None and self._seen is not None and same_key(key, self._seen)
        self._seen = key
        graph = None if key is None else self._graph_of(key, regions)
        if graph is None and alike:
            assert key is not None, "alike"
            graph = self._make(key, ids, positions, regions)
        if graph is None:
            return self._compute(ids, positions, regions)
        graph.inputs.take(regions)
        graph.ids.copy_(ids)
        graph.positions.copy_(positions)
        graph.replay()
        self.replayed += 1
        graph.inputs.give_back(regions)
        logits, lse = graph.outputs[-1]
        return logits.clone(), lse

    def _graph_of(self, key: tuple[Any, ...], regions: Sequence[StepRegions]) -> _Graph | None:
        """The graph that was made for such steps, if their tables still fit."""
        number = next((n for n, graph in self._graphs.items() if same_key(key, graph.key)), None)
        if number is None:
            return None
        self._graphs.move_to_end(number)
        if self._graphs[number].inputs.holds(regions):
            return self._graphs[number]
        del self._graphs[number]
        return None

    def _make(self, key: tuple[Any, ...], ids: Tensor, positions: Tensor, regions: Sequence[StepRegions]) -> _Graph:
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        inputs, own_ids, own_positions = StepInputs(regions), ids.clone(), positions.clone()
        outputs: list[tuple[Tensor, Tensor]] = []

        def work() -> None:
            outputs[:] = [self._compute(own_ids, own_positions, inputs.regions)]

        graph = _Graph(key, inputs, own_ids, own_positions, self._record(work, ids.device), outputs)
        self.recorded += 1
        self._graphs[self.recorded] = graph
        return graph

    def _compute(self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions]) -> tuple[Tensor, Tensor]:
        sums: list[Tensor] = []

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = ops.decode(DecodeArgs(q, k, v, regions[index]))
            sums.append(found.lse)
            return found.out.reshape(len(q), -1)

        logits = self._forward(ids, positions, attend, torch.arange(len(ids), device=ids.device))
        return logits, torch.stack(sums)
