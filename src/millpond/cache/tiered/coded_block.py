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

from collections.abc import Sequence

import torch
from torch import Tensor

from millpond.cache.coded.entries import before_rope, decoded
from millpond.cache.pages.pool import side_bytes
from millpond.cache.tiered.block_side import HEADER, BlockSide, SideFormat, read_side, restore_exact, write_sides
from millpond.cache.tiered.block_tokens import LayerTokens
from millpond.cache.types import RotaryEmbedding
from millpond.codec.transform.coding import encode_tokens
from millpond.codec.transform.page import TOKENS, PageAddress, page_bytes
from millpond.codec.transform.prompt_header import plain_headers
from millpond.codec.transform.storage_codec import StorageCodec
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import DataError

#: Number of the text in pages of a tree: blocks of many texts follow one another there.
_UNIT = 0


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
        exact = torch.float16 if dtype == torch.float16 else torch.bfloat16
        self._form = SideFormat(slots, self.shapes, exact)
        self._headers = plain_headers(transform.layers, bits)
        self._sizes = [page_bytes(header.bits) * self.pages for header in self._headers]

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
        n = HEADER.size
        for size, (heads, *dims), count in zip(self._sizes, self.shapes, exact.sum(1).tolist(), strict=True):
            n += 2 + count * (2 + 2 * heads * sum(dims)) + size
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
        pages = []
        for nth, (tokens, header) in enumerate(zip(layers, self._headers, strict=True)):
            keys, values = before_rope(tokens.keys, tokens.values, first, self._rotations[nth])
            address = PageAddress(_UNIT, nth, first // TOKENS)
            pages.append(encode_tokens(self._layers[nth], header, (keys.cpu(), values.cpu()), address))
        sides = write_sides(self._form, first, layers, exact)
        by_block = zip(*(part.view(len(sides), -1) for part in pages), strict=True)
        return [torch.cat([side, *of_block]) for side, of_block in zip(sides, by_block, strict=True)]

    @torch.no_grad()
    def decode(self, first: int, blocks: Sequence[Tensor]) -> list[LayerTokens]:
        """Return the tokens of blocks that follow one another, of each layer, on the CPU.

        Args:
            first: Position of their first token.
            blocks: What `encode` returned.

        Raises:
            DataError: a block is damaged, or belongs elsewhere.
        """
        sides = [read_side(self._form, block, first + n * self.slots) for n, block in enumerate(blocks)]
        parts = [self._pages_of(block, side) for block, side in zip(blocks, sides, strict=True)]
        found = []
        for nth, (header, shape) in enumerate(zip(self._headers, self.shapes, strict=True)):
            pages = torch.cat([of_block[nth] for of_block in parts]).view(-1, self._sizes[nth] // self.pages)
            address = PageAddress(_UNIT, nth, first // TOKENS)
            tokens = decoded(self._layers[nth], header, pages, address, shape, first, self._rotations[nth])
            keys, values = (side.to(self._dtype) for side in tokens)
            restore_exact(self._form, sides, nth, keys, values)
            scores = None
            if any(side.scores for side in sides):
                none = torch.zeros(shape[0], self.slots)
                scores = torch.cat([torch.tensor(side.scores[nth]) if side.scores else none for side in sides], 1)
            found.append(LayerTokens(keys, values, scores))
        return found

    def _pages_of(self, block: Tensor, side: BlockSide) -> Sequence[Tensor]:
        """Return the pages of each layer of a block.

        Raises:
            DataError: there are fewer or more.
        """
        if len(block) - side.nbytes != sum(self._sizes):
            raise DataError(f"a block of {len(block)} bytes is damaged: its pages have {sum(self._sizes)}")
        return torch.split(block[side.nbytes :], self._sizes)
