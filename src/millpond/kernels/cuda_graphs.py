"""Decoding steps of a layer recorded as CUDA graphs, with their regions in memory that stays in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
    """What records work."""

    def __call__(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Return what does the same again with the tensors that `work` reads and writes; it is run once before."""
        ...


def recording() -> bool:
    """Whether decoding steps on a GPU are recorded as graphs: MILLPOND_CUDA_GRAPHS says, by default they are.

    Raises:
        OptionError: another value than 0 or 1.
    """
    said = os.environ.get("MILLPOND_CUDA_GRAPHS", "1")
    if said not in ("0", "1"):
        raise OptionError(f"MILLPOND_CUDA_GRAPHS={said!r}: use 1 to record decoding steps as CUDA graphs, or 0")
    return said == "1"


def record_cuda(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a CUDA graph of `work`, which is run once before, so that all kernels are compiled and loaded."""
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
    """Return the stream of all records on a device, and a graph that keeps their memory: what one needs in between,
    another may use too, since they never run at the same time.
    """
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = _captured(lambda: torch.zeros(1, device="cuda"), None)
    torch.cuda.current_stream().wait_stream(stream)
    return stream, graph


def _captured(work: Callable[[], object], pool: Any) -> Any:
    graph: Any = torch.cuda.CUDAGraph()
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph


#: Columns of page tables are a multiple of this, and a quarter more than there are.
WIDTH_STEP = 16


class StepInputs:
    """Places for what is new in a step of some layers.

    Page ids, budgets and lengths are copied in before a step, lengths and counts of the dead back behind it: so pages
    may be added or sealed, and other sequences take the places of those that end.

    Args:
        regions: Of a step of each layer, for whose sizes places are made.

    Attributes:
        regions: The same with these places, in which no sequence takes part until `take`.
    """

    def __init__(self, regions: Sequence[StepRegions]) -> None:
        self._q_pos = torch.full_like(regions[0].q_pos, -1)
        self.regions = [_placed(one, self._q_pos) for one in regions]
        self._copied: list[tuple[Tensor, ...]] = [()] * len(regions)

    def holds(self, regions: Sequence[StepRegions]) -> bool:
        """Whether the tables of a step are no wider than the places for them."""
        return all(
            table.shape[1] <= own.shape[1]
            for one, place in zip(regions, self.regions, strict=True)
            for table, own in zip(_tables(one), _tables(place), strict=True)
        )

    def take(self, regions: Sequence[StepRegions]) -> None:
        """Copy those of a step. What is a tensor of its own whenever it changes is copied only then."""
        self._q_pos.copy_(regions[0].q_pos)
        for n, one in enumerate(regions):
            given = _given(one)
            if len(given) == len(self._copied[n]) and all(map(_is, given, self._copied[n])):
                continue
            for tensor, own in zip(given, _given(self.regions[n]), strict=True):
                (own if tensor.ndim == 1 else own[:, : tensor.shape[1]]).copy_(tensor)
            self._copied[n] = given
        _copy(_written(self.regions), _written(regions))

    def give_back(self, regions: Sequence[StepRegions]) -> None:
        """Copy back what the step has written besides pages."""
        _copy(_written(regions), _written(self.regions))


def key_of(regions: Sequence[StepRegions]) -> tuple[Any, ...] | None:
    """What a recorded step has noted by its address or value; None for steps that wait for the device."""
    numbers: list[float] = [len(regions[0].q_pos)]
    fixed: list[Any] = []
    for one in regions:
        if one.kept is not None or one.least is not None:
            return None
        numbers += (one.shape.scale, one.shape.softcap, one.shape.window, bool(one.plain.pages.n_arenas))
        fixed += (one.plain.pages, one.plain.pages.bases, one.rule, one.shape.sink_logits)
        if one.packed is not None:
            packed = one.packed
            numbers.append(bool(packed.pages.n_arenas))
            fixed += (packed.pages, packed.pages.bases, packed.channels, packed.balance, packed.key_scales, packed.rope)
    return numbers, *fixed


def same_key(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two steps have as many sequences, in the same pages, under the same rules."""
    return len(key) == len(other) and bool(key[0] == other[0]) and all(map(_is, key[1:], other[1:]))


def _is(one: object, other: object) -> bool:
    return one is other


def _placed(one: StepRegions, q_pos: Tensor) -> StepRegions:
    plain = replace(one.plain, table=_wider(one.plain.table), lens=one.plain.lens.clone())
    packed = None if one.packed is None else _placed_codes(one.packed)
    return replace(one, plain=plain, caps=one.caps.clone(), recent=one.recent.clone(), q_pos=q_pos, packed=packed)


def _placed_codes(packed: PackedRegions) -> PackedRegions:
    return replace(packed, table=_wider(packed.table), lens=packed.lens.clone(), dead=packed.dead.clone())


def _wider(table: Tensor) -> Tensor:
    """Return (R, n) with the page ids of a table (R, <= n) and room for some more."""
    wanted = table.shape[1] * 5 // 4
    widened = table.new_zeros(len(table), -(-max(wanted, 1) // WIDTH_STEP) * WIDTH_STEP)
    widened[:, : table.shape[1]] = table
    return widened


def _tables(one: StepRegions) -> list[Tensor]:
    return [one.plain.table] if one.packed is None else [one.plain.table, one.packed.table]


def _given(one: StepRegions) -> tuple[Tensor, ...]:
    """Return what is another tensor whenever the host changes it."""
    own = (one.plain.table, one.caps, one.recent)
    return own if one.packed is None else (*own, one.packed.table, one.packed.lens)


def _written(regions: Sequence[StepRegions]) -> list[Tensor]:
    """What a step writes besides pages."""
    return [t for one in regions for t in (one.plain.lens, *(() if one.packed is None else (one.packed.dead,)))]


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    torch._foreach_copy_(to, of)


class _Recording(NamedTuple):
    inputs: StepInputs
    rows: tuple[Tensor, Tensor, Tensor]  #: queries, new keys and new values
    replay: Callable[[], None]
    outputs: list[DecodeOutput]  #: one: of the step that was recorded


class RecordedDecode:
    """`ops.decode` of one layer: a step like the one before is recorded, and replayed as long as they are alike.

    Args:
        record: how.

    Attributes:
        recorded, replayed: Graphs that were made, and steps that they ran.
    """

    def __init__(self, record: GraphRecorder) -> None:
        self._record = record
        self._key: tuple[Any, ...] | None = None
        self._recording: _Recording | None = None
        self.recorded = self.replayed = 0

    def decode(self, args: DecodeArgs) -> DecodeOutput:
        """See `OpSet.decode`."""
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
        for own, given in zip(rows, (args.q, args.k_new, args.v_new), strict=True):
            own.copy_(given)
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
