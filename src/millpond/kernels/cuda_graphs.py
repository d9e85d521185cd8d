"""Decoding steps of a layer recorded as CUDA graphs, with their regions in memory that stays in place."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import ops
from millpond.kernels.args import DecodeArgs, DecodeOutput, StepRegions
from millpond.kernels.packed.regions import PackedRegions


class GraphRecorder(Protocol):
    """Recorder of work on a device."""

    def __call__(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Return a replay of `work` on the same tensors, after running it once."""
        ...


def recording() -> bool:
    """Whether decoding steps on a GPU are recorded as graphs.

    MILLPOND_CUDA_GRAPHS decides; by default they are.

    Raises:
        OptionError: another value than 0 or 1.
    """
    setting = os.environ.get("MILLPOND_CUDA_GRAPHS", "1")
    if setting not in ("0", "1"):
        raise OptionError(f"MILLPOND_CUDA_GRAPHS={setting!r}: use 1 to record decoding steps as CUDA graphs, or 0")
    return setting == "1"


def record_cuda(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a CUDA graph of `work`, which runs once before to compile and load its kernels."""
    with torch.cuda.device(device):
        stream, anchor = _shared(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
            graph = _captured(work, anchor.pool())
        torch.cuda.current_stream().wait_stream(stream)
    replay: Callable[[], None] = graph.replay
    return replay


@cache
def _shared(device: int) -> tuple[Any, Any]:
    """Return the stream of all records on a device, and a graph that keeps their memory.

    Memory that one needs in between, another may use too, since they never run at the same time.
    """
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = _captured(lambda: torch.zeros(1, device="cuda"), None)
    torch.cuda.current_stream().wait_stream(stream)
    return stream, graph


def _captured(work: Callable[[], object], pool: Any) -> Any:
    graph: Any = torch.cuda.CUDAGraph()
    with _no_collection():
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # of the device, about the same error
                _end(graph)
            raise
        _end(graph)
    return graph


def _end(graph: Any) -> None:
    """End a capture.

    The allocator's part of it ends too where the capture failed, so that later ones can begin.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # it had ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), graph.pool())
        raise


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage.

    Graphs and memory of a device that go end a capture that is under way.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


#: Fewest columns of page tables.
MIN_WIDTH = 32


def roomy(n: int) -> int:
    """Return the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96 .. that is n or more.

    n is at least 1. Steps have so many rows, and tables so many columns: few different ones, and at most half as many
    again as are used.
    """
    power: int = 1 << (n - 1).bit_length()
    return power * 3 // 4 if power > 16 and n <= power * 3 // 4 else power


def graph_bytes(heads: Sequence[tuple[int, int]], rows: int, width: int, row_bytes: int) -> int:
    """Return the bytes of the inputs and outputs of a recorded step of plain pages.

    Args:
        heads: KV heads and query heads of each layer.
        rows: Sequences that there is room for.
        width: Columns of page tables.
        row_bytes: Bytes of the logits of a row.
    """
    of_region = 4 * (width + 3)  # page ids, length, budget and protected entries
    of_layers = sum(n_kv_heads * of_region + 4 * n_heads for n_kv_heads, n_heads in heads)
    return rows * (of_layers + row_bytes + 4 + 2 * 8)  # with the id of a token, and its position in both widths


class StepInputs:
    """Fixed memory for the inputs of a step of some layers.

    Page ids, budgets and lengths are copied in before a step, lengths and counts of the dead back after it: so pages
    may be added or quantized, and other sequences take the rows of those that end.

    Args:
        regions: Regions of a step of each layer.
        n_seq: Sequences that the memory has rows for; None: those of the step.

    Attributes:
        regions: Regions in this memory, in which no sequence takes part until `take`.
    """

    def __init__(self, regions: Sequence[StepRegions], n_seq: int | None = None) -> None:
        given = len(regions[0].q_pos)
        n_seq = given if n_seq is None else n_seq
        self._q_pos = regions[0].q_pos.new_full((n_seq,), -1)
        self.regions = [_placed(one, self._q_pos, given) for one in regions]
        self._copied: list[tuple[Tensor, ...]] = [()] * len(regions)
        self._rows = 0  # sequences of the last step
        self._targets: list[Tensor] = []  # what was written of their rows

    @property
    def n_seq(self) -> int:
        """Sequences that there is room for."""
        return len(self._q_pos)

    @property
    def width(self) -> int:
        """Columns of all tables."""
        return sum(table.shape[1] for place in self.regions for table in _tables(place))

    @property
    def nbytes(self) -> int:
        """Bytes of this memory."""
        given = [t for place in self.regions for t in _given(place)]
        return sum(t.nbytes for t in (self._q_pos, *given, *_written(self.regions)))

    def holds(self, regions: Sequence[StepRegions]) -> bool:
        """Whether the sequences and tables of a step fit into this memory."""
        return len(regions[0].q_pos) <= self.n_seq and all(
            table.shape[1] <= own_table.shape[1]
            for region_set, place in zip(regions, self.regions, strict=True)
            for table, own_table in zip(_tables(region_set), _tables(place), strict=True)
        )

    def take(self, regions: Sequence[StepRegions]) -> None:
        """Copy the inputs of a step.

        Its sequences take the first rows; no sequence takes part in the others.
        A tensor that is a new one whenever it changes is copied only then.
        """
        rows = len(regions[0].q_pos)
        if rows != self._rows:
            self._q_pos[rows:] = -1
            self._rows = rows
            self._targets = [to[: len(of)] for to, of in zip(_written(self.regions), _written(regions), strict=True)]
        self._q_pos[:rows].copy_(regions[0].q_pos)
        for n, region_set in enumerate(regions):
            inputs = _given(region_set)
            if len(inputs) == len(self._copied[n]) and all(map(_is, inputs, self._copied[n])):
                continue
            for tensor, target in zip(inputs, _given(self.regions[n]), strict=True):
                part = target[: len(tensor)]
                (part if tensor.ndim == 1 else part[:, : tensor.shape[1]]).copy_(tensor)
            self._copied[n] = inputs
        _copy(self._targets, _written(regions))

    def give_back(self, regions: Sequence[StepRegions]) -> None:
        """Copy back what the step has written besides pages."""
        _copy(_written(regions), self._targets)


def key_of(regions: Sequence[StepRegions]) -> tuple[Any, ...] | None:
    """Return the addresses and values that a recorded step depends on.

    None for steps that wait for the device.
    """
    numbers: list[Any] = [len(regions[0].q_pos)]
    fixed: list[Any] = []
    for region_set in regions:
        if region_set.kept is not None or region_set.least is not None:
            return None
        numbers += (
            region_set.shape.scale,
            region_set.shape.softcap,
            region_set.shape.window,
            bool(region_set.plain.pages.n_arenas),
            region_set.rule,  # each batch cache has its own, of the same values
        )
        fixed += (region_set.plain.pages, region_set.plain.pages.bases, region_set.shape.sink_logits)
        if region_set.packed is not None:
            packed = region_set.packed
            numbers.append(bool(packed.pages.n_arenas))
            fixed += (packed.pages, packed.pages.bases, packed.channels, packed.balance, packed.key_scales, packed.rope)
    return numbers, *fixed


def same_key(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two steps have as many sequences, in the same pages, under the same rules."""
    return len(key) == len(other) and bool(key[0] == other[0]) and all(map(_is, key[1:], other[1:]))


def _is(left: object, right: object) -> bool:
    return left is right


def _placed(regions: StepRegions, q_pos: Tensor, given: int) -> StepRegions:
    """Return regions like those of `given` sequences, for those of q_pos, in other memory."""
    rows = len(regions.plain.lens) // max(given, 1) * len(q_pos)
    plain = replace(regions.plain, table=_room(regions.plain.table, rows), lens=regions.plain.lens.new_zeros(rows))
    packed = None if regions.packed is None else _placed_codes(regions.packed, rows)
    caps, recent = regions.caps.new_ones(rows), regions.recent.new_zeros(rows)
    return replace(regions, plain=plain, caps=caps, recent=recent, q_pos=q_pos, packed=packed)


def _placed_codes(packed: PackedRegions, rows: int) -> PackedRegions:
    lens, dead = (t.new_zeros(rows) for t in (packed.lens, packed.dead))
    return replace(packed, table=_room(packed.table, rows), lens=lens, dead=dead)


def _room(table: Tensor, rows: int) -> Tensor:
    """Return zeros (rows, n) with room for the page ids of a table (R, <= n) and for more."""
    return table.new_zeros(rows, roomy(max(table.shape[1], MIN_WIDTH)))


def _tables(regions: StepRegions) -> list[Tensor]:
    return [regions.plain.table] if regions.packed is None else [regions.plain.table, regions.packed.table]


def _given(regions: StepRegions) -> tuple[Tensor, ...]:
    """Return the tensors that are new ones whenever the host changes them."""
    inputs = (regions.plain.table, regions.caps, regions.recent)
    return inputs if regions.packed is None else (*inputs, regions.packed.table, regions.packed.lens)


def _written(regions: Sequence[StepRegions]) -> list[Tensor]:
    """Return the tensors that a step writes besides pages."""
    return [
        t
        for region_set in regions
        for t in (region_set.plain.lens, *(() if region_set.packed is None else (region_set.packed.dead,)))
    ]


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    torch._foreach_copy_(to, of)


class _Recording(NamedTuple):
    inputs: StepInputs
    rows: tuple[Tensor, Tensor, Tensor]  #: queries, new keys and new values
    replay: Callable[[], None]
    outputs: list[DecodeOutput]  #: one: of the step that was recorded


class RecordedDecode:
    """`ops.decode` of one layer: steps are recorded, and replayed while they are alike.

    Args:
        record: Recorder of a step.

    Attributes:
        recorded: Graphs that were made.
        replayed: Steps that the graphs ran.
    """

    def __init__(self, record: GraphRecorder) -> None:
        self._record = record
        self._key: tuple[Any, ...] | None = None
        self._recording: _Recording | None = None
        self.recorded = self.replayed = 0

    def decode(self, args: DecodeArgs) -> DecodeOutput:
        """Decode as `OpSet.decode` does."""
        regions = [args.regions]
        key = key_of(regions)
        if key is None or self._key is None or not same_key(key, self._key):
            self._key, self._recording = key, None
            return ops.decode(args)
        if self._recording is None or not self._recording.inputs.holds(regions):
            self._recording = None  # its memory goes first
            self._recording = self._make(args)
        inputs, rows, replay, outputs = self._recording
        inputs.take(regions)
        for target, source in zip(rows, (args.q, args.k_new, args.v_new), strict=True):
            target.copy_(source)
        replay()
        self.replayed += 1
        inputs.give_back(regions)
        return DecodeOutput(*(tensor.clone() for tensor in outputs[-1]))

    def _make(self, args: DecodeArgs) -> _Recording:
        inputs = StepInputs([args.regions])
        rows = args.q.clone(), args.k_new.clone(), args.v_new.clone()
        outputs: list[DecodeOutput] = []

        def work() -> None:
            outputs[:] = [ops.decode(DecodeArgs(*rows, inputs.regions[0]))]

        self.recorded += 1
        return _Recording(inputs, rows, self._record(work, args.q.device), outputs)
