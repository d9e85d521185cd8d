"""Layout of a model's weights in codes: a part for the ends and for each layer, in the order in which kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.kernels.quantized_weight import FORMATS, GROUP, QuantizedWeight
from millpond.models.gguf.blocks import GGUFBlocks
from millpond.models.lean.fuse import fusable
from millpond.models.lean.layers import block_of
from millpond.models.weights.layout import Codes, FileRun, TensorPlace
from millpond.models.weights.skeleton import Skeleton
from millpond.tiers.buffers import aligned_up

#: Bytes that codes, scales and the first of some biases begin at a multiple of.
_GRAIN = 64


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Matrices that read the same rows, one after another.

    Attributes:
        names: Names of the parameters.
        rows: Rows of each of them.
        width: Numbers of a row.
        bits: Bits of a code.
        dtype: Dtype of the rows that they are multiplied with.
        codes: First byte of the codes in the part.
        scales: First byte of the scales in the part.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    width: int
    bits: int
    dtype: torch.dtype
    codes: int
    scales: int

    def of(self, data: Tensor) -> Codes:
        """Return the matrices as views of a part (n,) uint8."""
        (shape, dtype), scales = QuantizedWeight.parts_of(sum(self.rows), self.width, self.bits)
        weight = QuantizedWeight(
            _view(data, self.codes, shape, dtype), _view(data, self.scales, scales, torch.float16), self.dtype
        )
        return Codes(self.names, self.rows, weight)


@dataclass(frozen=True, slots=True)
class CodedLayout:
    """Part of a packed file, read at once: matrices in codes, and the rest as it was saved.

    Attributes:
        matrices: Matrices in codes.
        plain: The other tensors, each with its place in the part.
        needed: Bytes up to the last tensor.
        sources: Places of the numbers or the codes of each tensor.
        blocks: Blocks of a GGUF file, of the matrices that come from there.
        path: File of the part; None while there is none.
        offset: First byte of the part in the file; 0 while there is none.
        checksum: CRC-32 of the part; None while there is no file.
    """

    matrices: tuple[PackedMatrix, ...]
    plain: Mapping[str, tuple[TensorPlace, int]]
    needed: int
    sources: Mapping[str, TensorPlace]
    blocks: Mapping[str, GGUFBlocks]
    path: Path | None = None
    offset: int = 0
    checksum: int | None = None

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, TensorPlace],
        groups: Iterable[Sequence[str]],
        bits: int,
        dtype: torch.dtype,
        of_file: Mapping[str, GGUFBlocks],
    ) -> CodedLayout:
        """Return the layout of tensors in a part, matrices in codes.

        Args:
            tensors: Tensors by name.
            groups: Names of the matrices that read the same rows.
            bits: Bits of a code where a GGUF file does not say.
            dtype: Dtype of rows, and of what is not in codes.
            of_file: Blocks of a GGUF file that tensors come from.

        Raises:
            UnsupportedModelError: a matrix has rows of no whole groups.
        """
        blocks = {name: of_file[place.name] for name, place in tensors.items() if place.name in of_file}
        end, matrices = 0, list[PackedMatrix]()
        for names in groups:
            width = tensors[names[0]].shape[1]
            if width % GROUP:
                raise UnsupportedModelError(
                    f"{names[0]} {tensors[names[0]].shape} cannot be quantized: codes are of groups of {GROUP} numbers "
                    "of a row; leave out weights="
                )
            for matrix_bits, some in groupby(names, key=lambda name: blocks[name].bits if name in blocks else bits):
                together = tuple(some)
                rows = tuple(tensors[name].shape[0] for name in together)
                (codes, _), scales = QuantizedWeight.parts_of(sum(rows), width, matrix_bits)
                at = _up(end)
                next_offset = _up(at + prod(codes))
                matrices.append(PackedMatrix(together, rows, width, matrix_bits, dtype, at, next_offset))
                end = next_offset + 2 * prod(scales)
        packed = {name for matrix in matrices for name in matrix.names}
        plain: dict[str, tuple[TensorPlace, int]] = {}
        end = _up(end)
        for name, tensor in tensors.items():  # in the order of the model, so biases stand one after another
            if name not in packed:
                stored_dtype = _held(tensor, dtype)
                end = -(-end // stored_dtype.dtype.itemsize) * stored_dtype.dtype.itemsize
                plain[name] = stored_dtype, end
                end += stored_dtype.nbytes
        blocks = {name: block for name, block in blocks.items() if name in packed}
        raw = {name: block.raw for name, block in blocks.items() if block.raw is not None}
        return cls(tuple(matrices), plain, end, {**tensors, **raw}, blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the part, a multiple of 4 KiB."""
        return aligned_up(self.needed)

    @property
    def runs(self) -> tuple[FileRun, ...]:
        """Runs that are read: the part."""
        assert self.path is not None, "of a part in a file"
        return (FileRun(self.path, self.offset, self.nbytes, self.needed, 0, self.checksum),)

    def described(self) -> dict[str, str]:
        """Return a description of each matrix in codes.

        It is "4 bits", or "4 bits of Q4_1" if a GGUF file has them, or "8 bits from Q6_K".
        """
        formats = {}
        for matrix in self.matrices:
            for name in matrix.names:
                blocks, bits = self.blocks.get(name), f"{matrix.bits} bits"
                how = "" if blocks is None else f" {'from' if blocks.raw is None else 'of'} {blocks.kind}"
                formats[name] = bits + how
        return formats

    def within(self, path: Path, offset: int, checksum: int) -> CodedLayout:
        """Return the part with its place in a file."""
        return replace(self, path=path, offset=offset, checksum=checksum)

    def codes(self, data: Tensor) -> Sequence[Codes]:
        """Return the matrices as views of a buffer (n,) uint8."""
        return [matrix.of(data) for matrix in self.matrices]

    def parameters(self, data: Tensor) -> dict[str, nn.Parameter]:
        """Return the other tensors as views of a buffer (n,) uint8, by name."""
        return {
            name: nn.Parameter(_view(data, place, tensor.shape, tensor.dtype), requires_grad=False)
            for name, (tensor, place) in self.plain.items()
        }


def packed_ends(skeleton: Skeleton, weights: str) -> CodedLayout:
    """Return the part outside the layers, with the head in codes.

    Embeddings are in codes if they share the head's matrix. Those of their own are looked up and not multiplied: they
    stay as they are, unless a GGUF file has codes.
    """
    tokens, head = skeleton.tokens_name, skeleton.head_name
    taken = skeleton.blocks.get(skeleton.ends[tokens].name)
    groups = [[head]]
    if tokens != head and taken is not None and taken.raw is not None:
        groups.append([tokens])
    return CodedLayout.of(skeleton.ends, groups, FORMATS[weights], skeleton.dtype, skeleton.blocks)


def packed_layer(skeleton: Skeleton, index: int, weights: str) -> CodedLayout:
    """Return the part of a layer with its matrices in codes.

    Those that read the same rows are next to each other, and so are their biases.
    """
    layer, tensors = skeleton.layers[index], skeleton.by_layer[index]
    block = block_of(layer, fusable)
    name_of = {id(weight): name for name, weight in layer.named_parameters()}
    projections = (block.qkv, block.out, block.up, block.down)
    groups = [[name_of[id(weight)] for weight, _ in taken.parts] for taken in projections]
    biases = [name_of[id(bias)] for taken in projections for _, bias in taken.parts if bias is not None]
    ordered = {name: tensors[name] for name in biases} | tensors
    return CodedLayout.of(ordered, groups, FORMATS[weights], skeleton.dtype, skeleton.blocks)


def _held(tensor: TensorPlace, dtype: torch.dtype) -> TensorPlace:
    """Return the place of a tensor as it is held in memory: floats in `dtype`."""
    if not tensor.dtype.is_floating_point or tensor.dtype == dtype:
        return tensor
    return replace(tensor, dtype=dtype, nbytes=prod(tensor.shape) * dtype.itemsize)


def _view(data: Tensor, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return data[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def _up(place: int) -> int:
    return -(-place // _GRAIN) * _GRAIN
