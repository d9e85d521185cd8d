"""Decoding steps of all layers recorded as graphs, each sequence with one token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from millpond.codec.basis import Basis
from millpond.kernels import ops
from millpond.kernels.args import DecodeArgs, StepRegions
from millpond.kernels.cuda_graphs import GraphRecorder, StepInputs, key_of, same_key
from millpond.kernels.decoder_ops import turned
from millpond.models.lean.block import Angles, TurningAttend

#: Graphs that are kept, of other numbers of sequences, methods or pools.
MAX_GRAPHS = 8

#: Runs rows through all layers: forward(ids (S,), positions (S,), attend, rows (S,)) -> logits (S, vocabulary).
Forward = Callable[[Tensor, Tensor, TurningAttend, Tensor], Tensor]


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
        forward: Forward pass of the decoder.
        record: Makes a graph of a step.

    Attributes:
        recorded: Number of graphs that were made.
        replayed: Number of steps that they ran.
    """

    def __init__(self, forward: Forward, record: GraphRecorder) -> None:
        self._forward, self._record = forward, record
        self._seen: tuple[Any, ...] | None = None
        self._graphs: OrderedDict[int, _Graph] = OrderedDict()
        self.recorded = self.replayed = 0

    def step(
        self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions], bases: Sequence[Basis | None]
    ) -> tuple[Tensor, Tensor]:
        """Return logits (S, vocabulary) and log-sum-exp (layers, S, n_heads) of the newest tokens.

        Args:
            ids: Ids of the tokens, (S,).
            positions: Positions of the tokens, (S,).
            regions: Entries that each layer attends to; written, as by `ops.decode`.
            bases: Basis of the entries of each layer.
        """
        key = _key_of(regions, bases)
        alike = key is not None and self._seen is not None and same_key(key, self._seen)
        self._seen = key
        graph = None if key is None else self._graph_of(key, regions)
        if graph is None and alike:
            assert key is not None, "alike"
            graph = self._make(key, ids, positions, regions, bases)
        if graph is None:
            return self._compute(ids, positions, regions, bases)
        graph.inputs.take(regions)
        graph.ids.copy_(ids)
        graph.positions.copy_(positions)
        graph.replay()
        self.replayed += 1
        graph.inputs.give_back(regions)
        logits, lse = graph.outputs[-1]
        return logits.clone(), lse

    def _graph_of(self, key: tuple[Any, ...], regions: Sequence[StepRegions]) -> _Graph | None:
        """Return the graph that was made for such steps, if their tables still fit."""
        number = next((n for n, graph in self._graphs.items() if same_key(key, graph.key)), None)
        if number is None:
            return None
        self._graphs.move_to_end(number)
        if self._graphs[number].inputs.holds(regions):
            return self._graphs[number]
        del self._graphs[number]
        return None

    def _make(
        self,
        key: tuple[Any, ...],
        ids: Tensor,
        positions: Tensor,
        regions: Sequence[StepRegions],
        bases: Sequence[Basis | None],
    ) -> _Graph:
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        inputs, own_ids, own_positions = StepInputs(regions), ids.clone(), positions.clone()
        outputs: list[tuple[Tensor, Tensor]] = []

        def work() -> None:
            outputs[:] = [self._compute(own_ids, own_positions, inputs.regions, bases)]

        graph = _Graph(key, inputs, own_ids, own_positions, self._record(work, ids.device), outputs)
        self.recorded += 1
        self._graphs[self.recorded] = graph
        return graph

    def _compute(
        self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions], bases: Sequence[Basis | None]
    ) -> tuple[Tensor, Tensor]:
        sums: list[Tensor] = []

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None) -> Tensor:
            basis, args = bases[index], DecodeArgs(q, k, v, regions[index], angles)
            if basis is not None:
                args = turned(args)
                q, k, v = (t[:, :, 0] for t in basis.stored(args.q[:, :, None], args.k_new[:, :, None], v[:, :, None]))
                args = replace(args, q=q, k_new=k, v_new=v)
            decoded = ops.decode(args)
            sums.append(decoded.lse)
            out = decoded.out if basis is None else basis.values(decoded.out)
            return out.reshape(len(q), -1)

        logits = self._forward(ids, positions, TurningAttend(attend), torch.arange(len(ids), device=ids.device))
        return logits, torch.stack(sums)


def _key_of(regions: Sequence[StepRegions], bases: Sequence[Basis | None]) -> tuple[Any, ...] | None:
    """Return what `key_of` does, and the bases."""
    key = key_of(regions)
    if key is None:
        return None
    numbers, *fixed = key
    turned = [basis is not None and basis.hadamard for basis in bases]
    return [*numbers, *turned], *fixed, *(None if basis is None else basis.scales for basis in bases)
