"""Beginnings of coded blocks: checksum, place, exact tokens and scores, before the pages; see `coded_block`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.tiered.block_tokens import LayerTokens
from millpond.errors import DataError
from millpond.kernels.checksum import crc32

#: Checksum, first token, tokens, and whether scores follow.
HEADER = struct.Struct("<IIHH")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SideFormat:
    """Form of the beginnings of the blocks of a model.

    Attributes:
        slots: Tokens of a block.
        shapes: KV heads, channels of a key and of a value of each layer.
        exact: Type of exact tokens, of 16 bits.
    """

    slots: int
    shapes: Sequence[tuple[int, int, int]]
    exact: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class BlockSide:
    """Beginning of a block.

    Attributes:
        nbytes: Its bytes.
        exact: For each layer the places of its exact tokens (m,), their keys (H, m, D) and values (H, m, V), as
            integers of 16 bits.
        scores: For each layer (H, slots) float32; none where all are 0.
    """

    nbytes: int
    exact: list[tuple[npt.NDArray[np.uint16], npt.NDArray[np.int16], npt.NDArray[np.int16]]]
    scores: list[npt.NDArray[np.float32]]


def write_sides(form: SideFormat, first: int, layers: Sequence[LayerTokens], exact: Tensor) -> list[Tensor]:
    """Return the beginnings of blocks that follow one another, (bytes,) uint8 each.

    Args:
        form: Their form.
        first: Position of the first token.
        layers: Tokens of each layer.
        exact: Which of these are exact, (layers, n) bool.
    """
    slots = form.slots
    n_layers, n = len(layers), exact.shape[1] // slots
    marked = exact.reshape(n_layers, n, slots).numpy()
    counts = marked.sum(2).astype(np.uint16)
    ends = np.pad(counts.astype(np.int64).cumsum(1), ((0, 0), (1, 0))).tolist()
    kept = [
        [_exact_numbers(side, at.nonzero()[:, 0], form.exact) for side in (tokens.keys, tokens.values)]
        for tokens, at in zip(layers, exact, strict=True)
    ]
    scores = [None if tokens.scores is None else tokens.scores.float().cpu().numpy() for tokens in layers]
    sides = []
    for number in range(n):
        own = slice(number * slots, (number + 1) * slots)
        scored = any(of is not None and bool(of[:, own].any()) for of in scores)
        parts = [counts[:, number].tobytes(), marked[:, number].nonzero()[1].astype(np.uint16).tobytes()]
        for of_layer, end in zip(kept, ends, strict=True):
            if end[number] < end[number + 1]:
                parts += [side[:, end[number] : end[number + 1]].tobytes() for side in of_layer]
        if scored:
            for (heads, _, _), of in zip(form.shapes, scores, strict=True):
                parts.append(bytes(4 * heads * slots) if of is None else of[:, own].tobytes())
        side = bytearray(b"".join([HEADER.pack(0, first + own.start, slots, int(scored)), *parts]))
        written = torch.frombuffer(side, dtype=torch.uint8)
        side[: _CHECKSUM.size] = _CHECKSUM.pack(crc32(written[_CHECKSUM.size :]))
        sides.append(written)
    return sides


def _exact_numbers(side: Tensor, at: Tensor, dtype: torch.dtype) -> npt.NDArray[np.int16]:
    """Return some tokens (H, n, D) in 16 bits."""
    numbers = side.index_select(1, at.to(side.device)).to(dtype).cpu()
    found: npt.NDArray[np.int16] = numbers.view(torch.int16).numpy()
    return found


def read_side(form: SideFormat, block: Tensor, first: int) -> BlockSide:
    """Return what stands before the pages of a block.

    Args:
        form: Its form.
        block: Bytes of the block, on the CPU.
        first: Position of its first token.

    Raises:
        DataError: it is damaged, or of another block.
    """
    data, n_layers, place = block.numpy(), len(form.shapes), HEADER.size
    checksum, number, slots, scored = HEADER.unpack(data[:place].tobytes())
    counts = data[place : place + 2 * n_layers].view(np.uint16).tolist()
    places = place + 2 * n_layers
    numbers = places + 2 * sum(counts)
    exact_bytes = sum(2 * m * heads * sum(dims) for m, (heads, *dims) in zip(counts, form.shapes, strict=True))
    score_bytes = sum(4 * heads * form.slots for heads, _, _ in form.shapes) if scored else 0
    end = numbers + exact_bytes + score_bytes
    if end > len(data) or crc32(block[_CHECKSUM.size : end]) != checksum:
        raise DataError(f"the block of tokens from {first} is damaged: its checksum differs")
    if (number, slots) != (first, form.slots):
        raise DataError(f"the block of tokens from {first} belongs to another place")
    exact = []
    for m, (heads, *dims) in zip(counts, form.shapes, strict=True):
        at, places = data[places : places + 2 * m].view(np.uint16), places + 2 * m
        sides = []
        for dim in dims:
            size = 2 * m * heads * dim
            sides.append(data[numbers : numbers + size].view(np.int16).reshape(heads, m, dim))
            numbers += size
        exact.append((at, sides[0], sides[1]))
    scores = []
    for heads, _, _ in form.shapes if scored else ():
        size = 4 * heads * form.slots
        scores.append(data[numbers : numbers + size].view(np.float32).reshape(heads, form.slots))
        numbers += size
    return BlockSide(end, exact, scores)


def restore_exact(form: SideFormat, sides: Sequence[BlockSide], nth: int, keys: Tensor, values: Tensor) -> None:
    """Write the exact tokens of a layer in place of those from pages.

    Args:
        form: Form of the blocks.
        sides: Beginnings of blocks that follow one another.
        nth: Number of the layer.
        keys: Its keys (H, n, D), which are changed.
        values: Its values (H, n, V), which are changed.
    """
    found = [(number, *side.exact[nth]) for number, side in enumerate(sides) if len(side.exact[nth][0])]
    if not found:
        return
    at = torch.from_numpy(np.concatenate([own.astype(np.int64) + n * form.slots for n, own, _, _ in found]))
    for target, parts in ((keys, [of for _, _, of, _ in found]), (values, [of for _, _, _, of in found])):
        numbers = torch.from_numpy(np.concatenate(parts, 1)).view(form.exact)
        target.index_copy_(1, at, numbers.to(target.dtype))
