"""Blocks of tokens of all layers as bytes, coded without a header of their own, with exact tokens and a checksum.

| bytes | what |
|---|---|
| 0 to 3 | CRC-32 of all behind them before the pages |
| 4 to 7 | number of the block's first token in its text |
| 8 to 9 | tokens of the block |
| 10 to 11 | 1 if scores follow, else 0 |
| | for each layer the number of its exact tokens, u16 |
| | the places of these in the block, u16, layer by layer |
| | for each layer their keys and then their values, head by head, in 16 bits |
| | if scores follow: those of all tokens, float32, head by head in each layer |
| | pages of 32 tokens, those of a layer together, see `millpond.codec.transform.page` |

All numbers are little-endian. The number of bytes follows from that of the exact tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond.cache.coded.entries import before_rope, decoded
from millpond.cache.pages.pool import side_bytes
from millpond.cache.pages.ref_counted_pool import PageIds
from millpond.cache.swap import read_pages, write_pages
from millpond.cache.tiered.block_store import Pools
from millpond.cache.types import RotaryEmbedding
from millpond.codec.basis import Basis
from millpond.codec.transform.coding import encode_tokens
from millpond.codec.transform.page import TOKENS, PageAddress, page_bytes
from millpond.codec.transform.prompt_header import plain_headers
from millpond.codec.transform.storage_codec import StorageCodec
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import DataError
from millpond.kernels.checksum import crc32

#: Checksum, first token, tokens, and whether scores follow.
_HEADER = struct.Struct("<IIHH")
#: Number of the text in pages of a tree: blocks of many texts follow one another there.
_UNIT = 0


class LayerTokens(NamedTuple):
    """Tokens of one layer that follow one another in a text."""

    keys: Tensor  #: (H, n, D) after RoPE
    values: Tensor  #: (H, n, V)
    scores: Tensor | None  #: (H, n) float32; None: all are 0


class BlockCodec:
    """Coder of blocks, whose codes depend on the tokens up to their end alone.

    Args:
        transform: Transform of the model.
        bits: Mean bits a number.
        rotations: Rotation of each layer's keys; None for one without.
        slots: Tokens of a block, a multiple of 32.
        dtype: Type of live entries.

    Attributes:
        name: Name of the codec.
        slots: Tokens of a block.
        shapes: KV heads, channels of a key and of a value of each layer.
    """

    def __init__(
        self,
        transform: ModelTransform,
        bits: float,
        rotations: Sequence[RotaryEmbedding | None],
        slots: int,
        dtype: torch.dtype,
    ) -> None:
        assert slots % TOKENS == 0, "blocks are whole pages"
        self.name = StorageCodec(bits).name
        self.slots, self.shapes = slots, transform.model.shapes
        self._layers, self._rotations, self._dtype = transform.layers, rotations, dtype
        self._exact_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
        self._headers = plain_headers(transform.layers, bits)

    @property
    def pages(self) -> int:
        """Pages of a block in a layer."""
        return self.slots // TOKENS

    @property
    def live_bytes(self) -> int:
        """Bytes of a block in pages, positions and scores included."""
        size = self._dtype.itemsize
        return sum(heads * self.slots * (sum(dims) * size + side_bytes(False)) for heads, *dims in self.shapes)

    def nbytes(self, exact: Tensor, scores: bool = False) -> int:
        """Return the bytes of a block before it is coded.

        Args:
            exact: Which of its tokens are exact in each layer, (layers, slots) bool.
            scores: Whether it has scores.
        """
        n = _HEADER.size
        for header, (heads, *dims), count in zip(self._headers, self.shapes, exact.sum(1).tolist(), strict=True):
            n += 2 + count * (2 + 2 * heads * sum(dims)) + self.pages * page_bytes(header.bits)
            n += 4 * heads * self.slots if scores else 0
        return n

    @torch.no_grad()
    def encode(self, first: int, layers: Sequence[LayerTokens], exact: Tensor) -> list[Tensor]:
        """Return blocks that follow one another in a text, (bytes,) uint8 each, on the CPU.

        Args:
            first: Position of the first token, a multiple of the block.
            layers: Tokens of each layer.
            exact: Which of these are exact, (layers, n) bool.
        """
        n = exact.shape[1]
        pages = []
        for nth, (tokens, header) in enumerate(zip(layers, self._headers, strict=True)):
            keys, values = before_rope(tokens.keys, tokens.values, first, self._rotations[nth])
            address = PageAddress(_UNIT, nth, first // TOKENS)
            pages.append(encode_tokens(self._layers[nth], header, (keys.cpu(), values.cpu()), address))
        blocks = []
        for number in range(n // self.slots):
            own = slice(number * self.slots, (number + 1) * self.slots)
            side = self._side(first + own.start, [_part(tokens, own) for tokens in layers], exact[:, own])
            of_block = [part[number * self.pages : (number + 1) * self.pages].flatten() for part in pages]
            blocks.append(torch.cat([side, *of_block]))
        return blocks

    @torch.no_grad()
    def decode(self, first: int, blocks: Sequence[Tensor]) -> list[LayerTokens]:
        """Return the tokens of blocks that follow one another, of each layer, on the CPU.

        Args:
            first: Position of their first token.
            blocks: What `encode` returned.

        Raises:
            DataError: a block is damaged, or belongs elsewhere.
        """
        sides = [self._read_side(block, first + n * self.slots) for n, block in enumerate(blocks)]
        begins = [side.nbytes for side in sides]
        found = []
        for nth, (header, shape) in enumerate(zip(self._headers, self.shapes, strict=True)):
            size = page_bytes(header.bits) * self.pages
            parts = [block[begin : begin + size] for block, begin in zip(blocks, begins, strict=True)]
            pages = torch.cat(parts).view(-1, page_bytes(header.bits))
            begins = [begin + size for begin in begins]
            address = PageAddress(_UNIT, nth, first // TOKENS)
            tokens = decoded(self._layers[nth], header, pages, address, shape, first, self._rotations[nth])
            keys, values = (side.to(self._dtype) for side in tokens)
            for number, side in enumerate(sides):
                at, exact_keys, exact_values = side.exact[nth]
                keys[:, at + number * self.slots] = exact_keys.to(self._dtype)
                values[:, at + number * self.slots] = exact_values.to(self._dtype)
            scores = [side.scores[nth] for side in sides if side.scores]
            found.append(LayerTokens(keys, values, torch.cat(scores, 1) if scores else None))
        return found

    def split(self, layers: Sequence[LayerTokens]) -> list[list[LayerTokens]]:
        """Return the tokens of each block, of all layers."""
        n = layers[0].keys.shape[1]
        return [[_part(tokens, slice(at, at + self.slots)) for tokens in layers] for at in range(0, n, self.slots)]

    def _side(self, first: int, layers: Sequence[LayerTokens], exact: Tensor) -> Tensor:
        """Return all bytes of a block before its pages."""
        scored = any(tokens.scores is not None and bool(tokens.scores.any()) for tokens in layers)
        parts = [
            exact.sum(1).to(torch.int16).view(torch.uint8),
            exact.nonzero()[:, 1].to(torch.int16).view(torch.uint8),
        ]
        for tokens, own in zip(layers, exact, strict=True):
            at = own.nonzero()[:, 0].to(tokens.keys.device)
            parts += [_bytes(x[:, at].to(self._exact_dtype)) for x in (tokens.keys, tokens.values)]
        if scored:
            for tokens in layers:
                scores = torch.zeros(tokens.keys.shape[:2]) if tokens.scores is None else tokens.scores
                parts.append(_bytes(scores.float()))
        body = torch.cat(parts)
        head = bytearray(_HEADER.pack(0, first, self.slots, int(scored)))
        side = torch.cat([torch.frombuffer(head, dtype=torch.uint8), body])
        side[:4] = torch.frombuffer(bytearray(struct.pack("<I", crc32(side[4:]))), dtype=torch.uint8)
        return side

    def _read_side(self, block: Tensor, first: int) -> _Side:
        """Return what stands before the pages.

        Raises:
            DataError: it is damaged, or of another block.
        """
        layers, place = len(self.shapes), _HEADER.size
        checksum, number, slots, scored = _HEADER.unpack(block[:place].numpy().tobytes())
        counts = block[place : place + 2 * layers].clone().view(torch.int16).int().tolist()
        exact_bytes = sum(
            count * (2 + 2 * heads * sum(dims)) for count, (heads, *dims) in zip(counts, self.shapes, strict=True)
        )
        score_bytes = sum(4 * heads * self.slots for heads, _, _ in self.shapes) if scored else 0
        end = place + 2 * layers + exact_bytes + score_bytes
        if min(counts) < 0 or end > len(block) or crc32(block[4:end]) != checksum:
            raise DataError(f"the block of tokens from {first} is damaged: its checksum differs")
        if (number, slots) != (first, self.slots):
            raise DataError(f"the block of tokens from {first} belongs to another place")
        place += 2 * layers
        places = torch.split(block[place : place + 2 * sum(counts)].clone().view(torch.int16).long(), counts)
        place += 2 * sum(counts)
        exact = []
        for at, (heads, *dims) in zip(places, self.shapes, strict=True):
            sides = []
            for dim in dims:
                size = 2 * heads * len(at) * dim
                part = block[place : place + size].clone().view(self._exact_dtype)
                sides.append(part.view(heads, len(at), dim))
                place += size
            exact.append((at, sides[0], sides[1]))
        scores = []
        for heads, _, _ in self.shapes if scored else ():
            size = 4 * heads * self.slots
            scores.append(block[place : place + size].clone().view(torch.float32).view(heads, self.slots))
            place += size
        return _Side(end, exact, scores)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Beginning of a block, before its pages.

    Attributes:
        nbytes: Its bytes.
        exact: For each layer the places of its exact tokens (m,), their keys (H, m, D) and values (H, m, V).
        scores: For each layer (H, slots) float32; none where all are 0.
    """

    nbytes: int
    exact: list[tuple[Tensor, Tensor, Tensor]]
    scores: list[Tensor]


def _part(tokens: LayerTokens, own: slice) -> LayerTokens:
    scores = None if tokens.scores is None else tokens.scores[:, own]
    return LayerTokens(tokens.keys[:, own], tokens.values[:, own], scores)


def _bytes(x: Tensor) -> Tensor:
    return x.cpu().contiguous().flatten().view(torch.uint8)


def as_computed(layers: Sequence[LayerTokens], bases: Sequence[Basis | None]) -> list[LayerTokens]:
    """Return tokens as the model computed them, of those in another basis."""
    return [
        tokens
        if basis is None
        else tokens._replace(keys=basis.keys_back(tokens.keys.float()), values=basis.values(tokens.values.float()))
        for tokens, basis in zip(layers, bases, strict=True)
    ]


def as_stored(layers: Sequence[LayerTokens], bases: Sequence[Basis | None]) -> list[LayerTokens]:
    """Return tokens as pages hold them, of those that the model computes."""
    return [
        tokens
        if basis is None
        else tokens._replace(keys=basis.keys(tokens.keys.float()), values=basis.values(tokens.values.float()))
        for tokens, basis in zip(layers, bases, strict=True)
    ]


def read_tokens(pools: Pools, blocks: Sequence[Sequence[PageIds]]) -> list[LayerTokens]:
    """Return the tokens of blocks that follow one another, of each layer.

    They are copied from pages.

    Args:
        pools: Pool of each layer.
        blocks: Pages of each layer, of each block.
    """
    found: dict[int, LayerTokens] = {}
    for pool in dict.fromkeys(pools):
        layers = [layer for layer, own in enumerate(pools) if own is pool]
        ids = np.stack([[block[layer] for block in blocks] for layer in layers])  # (layers, blocks, H)
        keys, values, _, scores, *_ = read_pages(pool, ids.ravel())
        for layer, *parts in zip(
            layers, *(x.view(*ids.shape, *x.shape[1:]) for x in (keys, values, scores)), strict=True
        ):
            own_keys, own_values, own_scores = (part.transpose(0, 1).flatten(1, 2) for part in parts)
            found[layer] = LayerTokens(own_keys, own_values, own_scores)
    return [found[layer] for layer in range(len(pools))]


def write_tokens(pools: Pools, pages: Sequence[PageIds], layers: Sequence[LayerTokens], first: int) -> None:
    """Write the tokens of a block to its pages.

    Args:
        pools: Pool of each layer.
        pages: Pages of each layer.
        layers: Tokens of each layer.
        first: Position of the first token.
    """
    for pool in dict.fromkeys(pools):
        own = [(pages[layer], layers[layer]) for layer, one in enumerate(pools) if one is pool]
        ids = np.concatenate([of_layer for of_layer, _ in own])
        keys = torch.cat([tokens.keys for _, tokens in own])
        values = torch.cat([tokens.values for _, tokens in own])
        scores = torch.cat([torch.zeros(t.keys.shape[:2]) if t.scores is None else t.scores for _, t in own])
        positions = torch.arange(first, first + keys.shape[1], dtype=torch.int32).repeat(len(ids), 1)
        types = [arenas[0].dtype for arenas in pool.arrays.arrays]
        content = [
            x.to(pool.arrays.device, dtype) for x, dtype in zip((keys, values, positions, scores), types, strict=True)
        ]
        write_pages(pool, ids, tuple(content))
