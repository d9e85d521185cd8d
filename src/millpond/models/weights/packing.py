"""Packing of a model's matrices: parts of `packed_layout` filled from its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from millpond.kernels.quantized_weight import QuantizedWeight
from millpond.models.weights.packed_layout import CodedLayout
from millpond.models.weights.sizes import PartLayout, WeightSizes
from millpond.models.weights.tensor_source import TensorSource

#: Shows that a share (0 to 1) of the work is done.
Report = Callable[[str, float], None]


def fill(part: CodedLayout, data: Tensor, source: TensorSource) -> Iterator[int]:
    """Fill the buffer (n,) uint8 of a part; yields the bytes that each tensor had in its file.

    Blocks of a GGUF file that are groups of ours are taken over, other matrices quantized.

    Raises:
        DataError: a file cannot be read, or is damaged. OptionError: a number is not finite, or beyond float16.
    """
    places = {name: coded for codes in part.codes(data) for name, coded in codes.apart()}
    plain = part.parameters(data)
    for name, numbers in source.each(part.sources):
        if name in places:
            room, blocks = places[name], part.blocks.get(name)
            if blocks is not None and blocks.raw is not None:
                packed = blocks.codes(numbers, room.dtype)
            else:
                packed = QuantizedWeight.quantize(numbers, room.bits)
            room.codes.copy_(packed.codes)
            room.scales.copy_(packed.scales)
        else:
            plain[name].data.copy_(numbers)
        yield part.sources[name].nbytes


class MemoryPacker:
    """Fills parts of a model in memory, without a file of packed weights.

    Args:
        sizes: of all parts. report: shown how far it is.
    """

    def __init__(self, sizes: WeightSizes, report: Report | None = None) -> None:
        self._source, self._report = TensorSource(), report or (lambda what, share: None)
        self._total, self._done = sum(source_bytes(part) for part in coded_parts(sizes)), 0

    def __enter__(self) -> MemoryPacker:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._source.__exit__(*exception)

    def __call__(self, part: PartLayout, data: Tensor) -> None:
        """Fill the buffer of a part: see `fill`."""
        assert isinstance(part, CodedLayout), "sizes of codes"
        for nbytes in fill(part, data, self._source):
            self._done += nbytes
            self._report("packing weights", self._done / self._total)


def coded_parts(sizes: WeightSizes) -> list[CodedLayout]:
    """The ends and each layer."""
    found = [sizes.ends, *sizes.layers]
    assert all(isinstance(part, CodedLayout) for part in found), "sizes of codes"
    return found  # type: ignore[return-value]


def source_bytes(part: CodedLayout) -> int:
    """Bytes of files that a part is made of."""
    return sum(place.nbytes for place in part.sources.values())
