"""Bytes that the weights of a model take, plain or in codes: the layouts of the buffers that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

from millpond.models.weights.layout import Codes, FileRun, Layout
from millpond.models.weights.on_disk import EndsOnDisk, RowRange
from millpond.models.weights.packed_layout import CodedLayout, packed_ends, packed_layer
from millpond.models.weights.skeleton import Skeleton
from millpond.tiers.buffers import aligned_up


class PartLayout(Protocol):
    """Layout of a buffer with the weights of the ends or of a layer."""

    @property
    def runs(self) -> tuple[FileRun, ...]:
        """Runs that are read into the buffer."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        ...

    def codes(self, data: Tensor) -> Sequence[Codes]:
        """Return matrices in codes, as views of a buffer (n,) uint8."""
        ...

    def parameters(self, data: Tensor) -> dict[str, nn.Parameter]:
        """Return all that is not in codes, as views of a buffer (n,) uint8, by name."""
        ...


class WeightSizes:
    """Bytes that the weights of a model take in memory, as they are read.

    Args:
        skeleton: Model without its weights.
        weights: "int8" or "int4" for matrices in codes; None for weights as they were saved.

    Attributes:
        ends: Layout of what is outside the layers.
        layers: Layout of each layer.

    Raises:
        UnsupportedModelError: a matrix that cannot be quantized.
    """

    def __init__(self, skeleton: Skeleton, weights: str | None = None) -> None:
        self._skeleton = skeleton
        self.ends: Layout | CodedLayout
        self.layers: tuple[PartLayout, ...]
        if weights is None:
            self.ends = Layout.of(skeleton.ends)
            self.layers = tuple(Layout.of(tensors) for tensors in skeleton.by_layer)
        else:
            self.ends = packed_ends(skeleton, weights)
            self.layers = tuple(packed_layer(skeleton, index, weights) for index in range(len(skeleton.layers)))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, which holds any of the layers, and some rows of the head."""
        layers = max(aligned_up(layout.nbytes) for layout in self.layers)
        return max(layers, self.ends_on_disk.least_slot_bytes)

    @property
    def ends_on_disk(self) -> EndsOnDisk:
        """Places of embeddings and head that are not in memory."""
        return EndsOnDisk.of(self._skeleton, self.ends)

    @property
    def tiles(self) -> tuple[RowRange, ...]:
        """Parts of the head that a slot holds."""
        return self.ends_on_disk.head.tiles(self.slot_bytes)

    def kept_bytes(self, layers: Iterable[int], *, ends_on_disk: bool = False) -> int:
        """Return the bytes of the ends and of the layers that stay in memory."""
        ends = self.ends_on_disk.held_bytes if ends_on_disk else aligned_up(self.ends.nbytes)
        return ends + sum(aligned_up(self.layers[index].nbytes) for index in layers)
