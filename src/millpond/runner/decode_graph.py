"""Decoding steps of a batch on a GPU as one recorded graph: a step then costs its kernels, not their launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from millpond.kernels import ops
from millpond.kernels.args import DecodeArgs, StepRegions
from millpond.models.lean.block import Attend

#: Columns of page tables in a graph are a multiple of this: few of the pages that a step takes make another graph.
WIDTH_STEP = 16

#: Runs rows through all layers: forward(ids (S,), positions (S,), attend, rows (S,)) -> logits (S, vocabulary).
Forward = Callable[[Tensor, Tensor, Attend, Tensor], Tensor]


class Record(Protocol):
    """How work is recorded."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does the same again, with the tensors that `work` has read and written."""
        ...


class CudaRecord:
    """Records CUDA graphs, whose memory is used again by the next one.

    Args:
        device: of all tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._pool = torch.cuda.graph_pool_handle()
            graph: Any = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


@dataclass(slots=True)
class _Inputs:
    """What a graph reads that is new in each step, in places that stay.

    Attributes:
        ids, positions, q_pos: (S,). tables: (R, n) page ids of each layer; copied: what lies in them.
    """

    ids: Tensor
    positions: Tensor
    q_pos: Tensor
    tables: list[Tensor]
    copied: list[Tensor | None]

    @classmethod
    def like(cls, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions]) -> _Inputs:
        tables = [
            one.plain.table.new_zeros(len(one.plain.table), -(-one.plain.table.shape[1] // WIDTH_STEP) * WIDTH_STEP)
            for one in regions
        ]
        return cls(ids.clone(), positions.clone(), regions[0].q_pos.clone(), tables, [None] * len(tables))

    def holds(self, regions: Sequence[StepRegions]) -> bool:
        """Whether the tables are wide enough."""
        return all(one.plain.table.shape[1] <= own.shape[1] for one, own in zip(regions, self.tables, strict=True))

    def take(self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions]) -> None:
        """Copy those of a step."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        self.q_pos.copy_(regions[0].q_pos)
        for n, one in enumerate(regions):
            table = one.plain.table
            if table is not self.copied[n]:
                self.tables[n][:, : table.shape[1]].copy_(table)
                self.copied[n] = table

    def of(self, regions: Sequence[StepRegions]) -> list[StepRegions]:
        """The regions of a step, with these tables and positions."""
        return [
            replace(one, plain=replace(one.plain, table=table), q_pos=self.q_pos)
            for one, table in zip(regions, self.tables, strict=True)
        ]


class DecodeGraph:
    """Decoding steps of all layers, each sequence with one token.

    A step whose tensors are those of the step before is recorded, and replayed as long as they stay: page ids are
    copied to tables of its own, so that new pages change nothing. Where others come, because a sequence has come or
    gone, steps are launched kernel by kernel until two are alike again.

    Args:
        forward: of the decoder. record: how a graph is made.

    Attributes:
        recorded, replayed: graphs that were made, and steps that they ran.
    """

    def __init__(self, forward: Forward, record: Record) -> None:
        self._forward, self._record = forward, record
        self._seen: tuple[Any, ...] | None = None
        self._replay: Callable[[], None] | None = None
        self._inputs: _Inputs | None = None
        self._outputs: tuple[Tensor, Tensor] | None = None
        self.recorded = self.replayed = 0

    def step(self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions]) -> tuple[Tensor, Tensor]:
        """Logits (S, vocabulary) and log-sum-exp (layers, S, n_heads) of the newest token of each sequence.

        Args:
            ids, positions: (S,) of the tokens. regions: what each layer meets; written, as by `ops.decode`.
        """
        key = _key(regions)
        alike = key is not None and self._seen is not None and _same(key, self._seen)
        if not alike:
            self._forget()
            self._seen = key
            return self._compute(ids, positions, regions)
        if self._inputs is None or not self._inputs.holds(regions):
            self._forget()
            self._record_step(ids, positions, regions)
        assert self._inputs is not None, "recorded above"
        assert self._replay is not None, "recorded above"
        self._inputs.take(ids, positions, regions)
        self._replay()
        self.replayed += 1
        assert self._outputs is not None, "of the work that was recorded"
        logits, lse = self._outputs
        return logits.clone(), lse

    def _record_step(self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions]) -> None:
        inputs = _Inputs.like(ids, positions, regions)
        inside = inputs.of(regions)

        def work() -> None:
            self._outputs = self._compute(inputs.ids, inputs.positions, inside)

        self._replay = self._record(work)
        self._inputs = inputs
        self.recorded += 1

    def _compute(self, ids: Tensor, positions: Tensor, regions: Sequence[StepRegions]) -> tuple[Tensor, Tensor]:
        sums: list[Tensor] = []

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = ops.decode(DecodeArgs(q, k, v, regions[index]))
            sums.append(found.lse)
            return found.out.reshape(len(q), -1)

        logits = self._forward(ids, positions, attend, torch.arange(len(ids), device=ids.device))
        return logits, torch.stack(sums)

    def _forget(self) -> None:
        """Let go of the graph and its memory."""
        self._replay = self._inputs = self._outputs = None


def _key(regions: Sequence[StepRegions]) -> tuple[Any, ...] | None:
    """What a graph has noted of the regions by its address or value; None where a step waits for the device."""
    found: list[Any] = []
    for one in regions:
        if one.packed is not None or one.kept is not None or one.least is not None:
            return None
        pages = one.plain.pages
        found += (one.plain.lens, one.caps, one.recent, pages, pages.bases, one.rule, one.shape)
    return tuple(found)


def _same(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(key) == len(other) and all(one is another for one, another in zip(key, other, strict=True))
