"""Decoding steps of all layers recorded as graphs, each sequence with one token."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from millpond.codec.basis import Basis
from millpond.kernels import ops
from millpond.kernels.args import DecodeArgs, StepRegions
from millpond.kernels.cuda_graphs import GraphRecorder, StepInputs, key_of, roomy, same_key
from millpond.kernels.decoder_ops import turned
from millpond.models.lean.block import Angles, TurningAttend

#: Graphs that are kept, of other numbers of sequences, widths of tables, methods or pools.
MAX_GRAPHS = 24
#: Steps back that are looked at for one that is alike: two where the number of sequences goes to and fro.
LOOK_BACK = 2

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

    A step is recorded where one just before had about as many sequences in the same pools under the same rules. It is
    replayed for such steps from then on, whatever their sequences are: a graph has rows and page tables of `roomy`
    sizes, so that few are made while sequences come, grow and go.

    Args:
        forward: Forward pass of the decoder.
        record: Makes a graph of a step.

    Attributes:
        recorded: Number of graphs that were made.
        replayed: Number of steps that they ran.
    """

    def __init__(self, forward: Forward, record: GraphRecorder) -> None:
        self._forward, self._record = forward, record
        self._seen: deque[tuple[Any, ...] | None] = deque(maxlen=LOOK_BACK)
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
        alike = key is not None and any(seen is not None and same_key(key, seen) for seen in self._seen)
        self._seen.append(key)
        graph = None if key is None else self._graph_of(key, regions)
        if graph is None and alike:
            assert key is not None, "alike"
            graph = self._make(key, ids, positions, regions, bases)
        if graph is None:
            return self._compute(ids, positions, regions, bases)
        n = len(ids)
        graph.inputs.take(regions)
        graph.ids[:n].copy_(ids)
        graph.positions[:n].copy_(positions)
        graph.replay()
        self.replayed += 1
        graph.inputs.give_back(regions)
        logits, lse = graph.outputs[-1]
        return logits[:n].clone(), lse[:, :n]

    @property
    def nbytes(self) -> int:
        """Bytes of what graphs read and return, besides weights, pages and memory that they share."""
        return sum(
            graph.inputs.nbytes + sum(t.nbytes for t in (graph.ids, graph.positions, *graph.outputs[-1]))
            for graph in self._graphs.values()
        )

    def _graph_of(self, key: tuple[Any, ...], regions: Sequence[StepRegions]) -> _Graph | None:
        """Return the graph that was made for such steps, the narrowest whose tables fit."""
        fitting = [
            number for number, graph in self._graphs.items() if same_key(key, graph.key) and graph.inputs.holds(regions)
        ]
        if not fitting:
            return None
        number = min(fitting, key=lambda number: self._graphs[number].inputs.width)
        self._graphs.move_to_end(number)
        return self._graphs[number]

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
        inputs = StepInputs(regions, _rows_of(regions))
        own_ids, own_positions = (t.new_zeros(inputs.n_seq) for t in (ids, positions))
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
    """Return what `key_of` does, with the rows of a graph for the sequences, and the bases."""
    key = key_of(regions)
    if key is None:
        return None
    (_, *numbers), *fixed = key
    turned = [basis is not None and basis.hadamard for basis in bases]
    scales = (None if basis is None else basis.scales for basis in bases)
    return [_rows_of(regions), *numbers, *turned], *fixed, *scales


def _rows_of(regions: Sequence[StepRegions]) -> int:
    """Return the rows of a graph of such steps.

    There are no more than sequences where formats know each of them.
    """
    n = len(regions[0].q_pos)
    own = any(one.packed is not None and one.packed.knows_regions for one in regions)
    return n if own else roomy(n)
