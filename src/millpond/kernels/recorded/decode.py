"""The decoding step of one layer, recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from millpond.kernels import ops
from millpond.kernels.args import DecodeArgs, DecodeOutput
from millpond.kernels.recorded.record import GraphRecorder
from millpond.kernels.recorded.step_inputs import StepInputs, key_of, same_key


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
        self._inputs: StepInputs | None = None
        self._replay: Callable[[], None] | None = None
        self._args: tuple[Tensor, Tensor, Tensor] | None = None
        self._output: DecodeOutput | None = None
        self.recorded = self.replayed = 0

    def decode(self, args: DecodeArgs) -> DecodeOutput:
        """See `OpSet.decode`."""
        regions = [args.regions]
        key = key_of(regions)
        if key is None or self._key is None or not same_key(key, self._key):
            self._key, self._inputs, self._replay, self._output = key, None, None, None
            return ops.decode(args)
        if self._inputs is None or not self._inputs.holds(regions):
            self._make(args)
        assert self._inputs is not None, "made above"
        assert self._replay is not None, "made above"
        assert self._args is not None, "made above"
        self._inputs.take(regions)
        for own, given in zip(self._args, (args.q, args.k_new, args.v_new), strict=True):
            own.copy_(given)
        self._replay()
        self.replayed += 1
        self._inputs.give_back(regions)
        assert self._output is not None, "of the step that was recorded"
        return DecodeOutput(*(found.clone() for found in self._output))

    def _make(self, args: DecodeArgs) -> None:
        self._replay = self._output = None
        inputs = StepInputs([args.regions])
        own = args.q.clone(), args.k_new.clone(), args.v_new.clone()

        def work() -> None:
            self._output = ops.decode(DecodeArgs(*own, inputs.regions[0]))

        self._replay = self._record(work, args.q.device)
        self._inputs, self._args = inputs, own
        self.recorded += 1
