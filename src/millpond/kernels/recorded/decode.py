"""The decoding step of one layer, recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from millpond.kernels import ops
from millpond.kernels.args import DecodeArgs, DecodeOutput
from millpond.kernels.recorded.record import GraphRecorder
from millpond.kernels.recorded.step_inputs import StepInputs, key_of, same_key


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
        recorded, replayed: graphs that were made, and steps that they ran.
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
        return DecodeOutput(*(found.clone() for found in outputs[-1]))

    def _make(self, args: DecodeArgs) -> _Recording:
        inputs = StepInputs([args.regions])
        rows = args.q.clone(), args.k_new.clone(), args.v_new.clone()
        outputs: list[DecodeOutput] = []

        def work() -> None:
            outputs[:] = [ops.decode(DecodeArgs(*rows, inputs.regions[0]))]

        self.recorded += 1
        return _Recording(inputs, rows, self._record(work, args.q.device), outputs)
