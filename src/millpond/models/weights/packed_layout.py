"""Layout of a model's weights in codes: a part for the ends and for each layer, in the order in which kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.kernels.quantized_weight import FORMATS, GROUP, QuantizedWeight
from millpond.models.lean.fuse import fusable
from millpond.models.lean.layers import block_of
from millpond.models.weights.headers import TensorPlace
from millpond.models.weights.layout import Codes, FileRun
from millpond.models.weights.skeleton import Skeleton
from millpond.tiers.aligned import aligned_up

#: Bytes that codes, scales and the first of some biases begin at a multiple of.
_GRAIN = 64


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Matrices that read the same rows, one after another.

    Attributes:
        names: of the parameters. rows: of each of them. width: numbers of a row. bits: of a code. dtype: of the rows
            that they meet. codes, scales: where they begin in the part.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    width: int
    bits: int
    dtype: torch.dtype
    codes: int
    scales: int

    def of(self, data: Tensor) -> Codes:
        """The matrices as views of a part (n,) uint8."""
        (shape, dtype), scales = QuantizedWeight.parts_of(sum(self.rows), self.width, self.bits)
        whole = QuantizedWeight(
            _view(data, self.codes, shape, dtype), _view(data, self.scales, scales, torch.float16), self.dtype
        )
        return Codes(self.names, self.rows, whole)


@dataclass(frozen=True, slots=True)
class CodedLayout:
    """A part of a packed file, read at once: matrices in codes, and what stays as it was saved.

    Attributes:
        matrices: in codes. plain: the other tensors, each with its place in the part. needed: bytes up to the last.
        path, offset, checksum: of the part in a file; None, 0 and None while there is none.
    """

    matrices: tuple[PackedMatrix, ...]
    plain: Mapping[str, tuple[TensorPlace, int]]
    needed: int
    path: Path | None = None
    offset: int = 0
    checksum: int | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, TensorPlace], groups: Iterable[Sequence[str]], bits: int) -> CodedLayout:
        """
        Args:
            tensors: by name. groups: names of the matrices that read the same rows.

        Raises:
            UnsupportedModelError: a matrix has rows of no whole groups.
        """
        end, matrices = 0, []
        for names in groups:
            rows, width = tuple(tensors[name].shape[0] for name in names), tensors[names[0]].shape[1]
            if width % GROUP:
                raise UnsupportedModelError(
                    f"{names[0]} {tensors[names[0]].shape} cannot be quantized: codes are of groups of {GROUP} numbers "
                    "of a row; leave out weights="
                )
            (codes, _), scales = QuantizedWeight.parts_of(sum(rows), width, bits)
            at = _up(end)
            behind = _up(at + prod(codes))
            matrices.append(PackedMatrix(tuple(names), rows, width, bits, tensors[names[0]].dtype, at, behind))
            end = behind + 2 * prod(scales)
        packed = {name for matrix in matrices for name in matrix.names}
        plain: dict[str, tuple[TensorPlace, int]] = {}
        end = _up(end)
        for name, tensor in tensors.items():  # in the order of the model, so biases stand one after another
            if name not in packed:
                end = -(-end // tensor.dtype.itemsize) * tensor.dtype.itemsize
                plain[name] = tensor, end
                end += tensor.nbytes
        return cls(tuple(matrices), plain, end)

    @property
    def nbytes(self) -> int:
        """Of the part, a multiple of 4 KiB."""
        return aligned_up(self.needed)

    @property
    def runs(self) -> tuple[FileRun, ...]:
        """What is read: the part."""
        assert self.path is not None, "of a part in a file"
        return (FileRun(self.path, self.offset, self.nbytes, self.needed, 0, self.checksum),)

    def within(self, path: Path, offset: int, checksum: int) -> CodedLayout:
        """The part where it lies in a file."""
        return replace(self, path=path, offset=offset, checksum=checksum)

    def codes(self, data: Tensor) -> Sequence[Codes]:
        """The matrices as views of a buffer (n,) uint8."""
        return [matrix.of(data) for matrix in self.matrices]

    def parameters(self, data: Tensor) -> dict[str, nn.Parameter]:
        """The other tensors as views of a buffer (n,) uint8, by name."""
        return {
            name: nn.Parameter(_view(data, place, tensor.shape, tensor.dtype), requires_grad=False)
            for name, (tensor, place) in self.plain.items()
        }


def packed_ends(skeleton: Skeleton, weights: str) -> CodedLayout:
    """What lies outside the layers, with the head in codes, and with it the embeddings where it shares them."""
    model: Any = skeleton.model
    source = model.get_input_embeddings() if skeleton.tied else model.get_output_embeddings()
    head = next(name for name, weight in model.named_parameters(remove_duplicate=False) if weight is source.weight)
    return CodedLayout.of(skeleton.ends, [[head]], FORMATS[weights])


def packed_layer(skeleton: Skeleton, index: int, weights: str) -> CodedLayout:
    """A layer with its matrices in codes; those that read the same rows stand one after another, and so do their
    biases.
    """
    layer, tensors = skeleton.layers[index], skeleton.by_layer[index]
    block = block_of(layer, fusable)
    name_of = {id(weight): name for name, weight in layer.named_parameters()}
    projections = (block.qkv, block.out, block.up, block.down)
    groups = [[name_of[id(weight)] for weight, _ in taken.parts] for taken in projections]
    biases = [name_of[id(bias)] for taken in projections for _, bias in taken.parts if bias is not None]
    ordered = {name: tensors[name] for name in biases} | tensors
    return CodedLayout.of(ordered, groups, FORMATS[weights])


def _view(data: Tensor, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return data[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def _up(place: int) -> int:
    return -(-place // _GRAIN) * _GRAIN
