"""Matrices of a GGUF file whose blocks are groups of ours, so that their codes are used unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millpond.errors import DataError
from millpond.kernels.quantized_weight import GROUP, QuantizedWeight
from millpond.models.gguf.converted import source_of
from millpond.models.gguf.header import GGUFHeader, GGUFTensor, read_header
from millpond.models.weights.layout import TensorPlace
from millpond.models.weights.tensor_source import TensorSource
from millpond.optional import require

#: Block types of 32 numbers with a step, or with a step and a least number: bits of a code, bytes of a block.
TAKEN = {"Q4_0": (4, 18), "Q4_1": (4, 20), "Q8_0": (8, 34)}
#: Bits of a number, its scales among them, above which blocks of another type are packed in 8 bits.
MAX_IN_4 = 5.0
#: Where rows are compared with those of the converted folder, as shares of all.
_COMPARED = (0.0, 0.31, 0.5, 0.77, 1.0)


@dataclass(frozen=True, slots=True)
class GGUFBlocks:
    """Matrix of a GGUF file that a tensor of the converted folder was made from.

    Attributes:
        kind: Type of its blocks, such as "Q6_K".
        raw: Place of its bytes, (n, bytes of a row) uint8; None if its codes are not used.
        heads: Heads whose rows are stored with their halves pair by pair; 0 if rows are in the model's order.
    """

    kind: str
    bits: int
    raw: TensorPlace | None = None
    heads: int = 0

    def codes(self, raw: Tensor, dtype: torch.dtype) -> QuantizedWeight:
        """Return the matrix from its bytes (n, bytes of a row) uint8, for rows of `dtype`.

        No number changes.

        Raises:
            DataError: a scale is not finite, so that the file is damaged, or its least number is beyond float16.
        """
        weight = _codes(raw, self.kind, dtype)
        if not bool(weight.scales.isfinite().all()):
            assert self.raw is not None, "of blocks that are taken over"
            raise DataError(
                f"{self.raw.path}: scales of {self.raw.name!r} are not finite, or beyond float16; the file is damaged"
            )
        if not self.heads:
            return weight
        order = _order(len(weight), self.heads)
        return QuantizedWeight(weight.codes[order], weight.scales[order], dtype)


def blocks_of(folder: Path, tensors: Mapping[str, TensorPlace], config: Any) -> dict[str, GGUFBlocks]:
    """Return the GGUF matrices of a converted folder by name, or nothing for other folders.

    Blocks are used if some of their rows equal those of the folder, in the order of the model or in that in which
    llama.cpp stores the rows of heads that rotate.

    Args:
        folder: Folder of the model.
        tensors: Tensors of the folder, by name.
        config: Configuration of the model.

    Raises:
        DataError: one of the files cannot be read.
    """
    path = source_of(folder)
    if path is None:
        return {}
    header = read_header(path)
    heads = [int(getattr(config, name, 0) or 0) for name in ("num_attention_heads", "num_key_value_heads")]
    blocks_by_name = {}
    with TensorSource() as source:
        for name, place, tensor in _pairs(header, tensors):
            blocks = _of_kind(header, path, tensor)
            if blocks is not None and blocks.raw is not None:
                blocks = _in_order(blocks, place, heads, source)
            if blocks is not None:
                blocks_by_name[name] = blocks
    return blocks_by_name


def _pairs(header: GGUFHeader, tensors: Mapping[str, TensorPlace]) -> Iterator[tuple[str, TensorPlace, GGUFTensor]]:
    """Return the matrices of a folder with those of the file under llama.cpp's names for them."""
    gguf = require("gguf", "gguf", "a GGUF file")
    arch = next((kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    if arch is None:
        return
    names = gguf.get_tensor_name_map(arch, int(header.metadata.get(f"{header.architecture}.block_count", 0)))
    by_name = {tensor.name: tensor for tensor in header.tensors}
    for name, place in tensors.items():
        tensor = by_name.get(str(names.get_name(name, try_suffixes=(".weight",))))
        if tensor is not None and len(tensor.shape) == 2 and tensor.shape[::-1] == place.shape:
            yield name, place, tensor


def _of_kind(header: GGUFHeader, path: Path, tensor: GGUFTensor) -> GGUFBlocks | None:
    """Return a matrix by the type of its blocks, or None if it has plain numbers."""
    if tensor.type in TAKEN:
        bits, nbytes = TAKEN[tensor.type]
        row = tensor.shape[0] // GROUP * nbytes
        raw = TensorPlace(tensor.name, path, tensor.begin, row * tensor.shape[1], torch.uint8, (tensor.shape[1], row))
        return GGUFBlocks(tensor.type, bits, raw)
    gguf = require("gguf", "gguf", "a GGUF file")
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]]
    if block == 1:
        return None
    return GGUFBlocks(tensor.type, 8 if 8 * nbytes / block > MAX_IN_4 else 4)


def _in_order(blocks: GGUFBlocks, place: TensorPlace, heads: list[int], source: TensorSource) -> GGUFBlocks:
    """Return blocks with the order of their rows, determined by comparing some.

    Blocks whose rows fit in no order are not used.
    """
    assert blocks.raw is not None, "of blocks that are taken over"
    n = place.shape[0]
    rows = sorted({min(n - 1, int(share * (n - 1)) + 1) for share in _COMPARED} | {0})
    stored_rows = torch.stack([source.row(place, row) for row in rows]).float()
    for count in dict.fromkeys([0, *(count for count in heads if count and n % (2 * count) == 0)]):
        order = _order(n, count) if count else torch.arange(n)
        raw = torch.stack([source.row(blocks.raw, int(order[row])) for row in rows])
        numbers = _codes(raw, blocks.kind, place.dtype).widen(torch.float32)
        close = (numbers - stored_rows).abs() <= 2 * torch.finfo(place.dtype).eps * stored_rows.abs().amax(
            1, keepdim=True
        )
        if bool(close.all()):
            return GGUFBlocks(blocks.kind, blocks.bits, blocks.raw, count)
    return GGUFBlocks(blocks.kind, blocks.bits)


def _codes(raw: Tensor, kind: str, dtype: torch.dtype) -> QuantizedWeight:
    """Return codes and scales of blocks (n, bytes of a row) uint8."""
    _, nbytes = TAKEN[kind]
    blocks = raw.view(len(raw), -1, nbytes)
    first = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if kind == "Q8_0":
        return QuantizedWeight(blocks[..., 2:].contiguous().view(torch.int8), first[:, None].contiguous(), dtype)
    minimum = -8 * first if kind == "Q4_0" else blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]
    scales = torch.stack([first, minimum], 1)
    return QuantizedWeight(blocks[..., nbytes - GROUP // 2 :].contiguous(), scales, dtype)


def _order(n: int, heads: int) -> Tensor:
    """Return which row of the file each of n rows is.

    There a row of the first half of a head is followed by its partner.
    """
    return torch.arange(n).view(heads, -1, 2).transpose(1, 2).reshape(-1)
