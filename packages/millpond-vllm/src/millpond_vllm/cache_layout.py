"""Layouts of keys and values inside the blocks of a layer's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from millpond import OptionError, UnsupportedModelError
from millpond.plugins import KeyOrder

#: Writes keys and values (block size, H, D) into places of a cache of one block, as the engine's own writer does.
Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]
#: Digits of a place number: each is exact in a number of 8 bits and more, with 2 bits of fraction as with 7.
_BASE = 8


class CacheLayout(Protocol):
    """Reading and writing of whole blocks, in the dtype in which they are stored."""

    def read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (H, n * block size, D) of n blocks in order."""
        ...

    def write(self, cache: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (H, n * block size, D) into n blocks."""
        ...

    def read_keys(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """Return keys (H, n * block size, D) of n blocks in order."""
        ...

    def keys(self, cache: Tensor) -> tuple[Tensor, KeyOrder]:
        """Return the keys of all blocks as they lie, (blocks, H, numbers), and their order."""
        ...


@dataclass(frozen=True)
class HeadMajorLayout:
    """(blocks, H, block size, 2 D) of one processor: keys of a block, then its values, in an order of their own.

    Attributes:
        keys_at: (block size * D,) int64: place of each number of the keys inside a head's part of a block.
        values_at: The same of the values.
        block: Tokens of a block.
    """

    keys_at: Tensor
    values_at: Tensor
    block: int

    @classmethod
    def probe(
        cls, n_heads: int, block: int, dim: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], write: Writer
    ) -> HeadMajorLayout:
        """Find the order by writing known numbers through the engine's own writer.

        Args:
            n_heads: KV heads.
            block: Tokens of a block.
            dim: Width of a key, which is that of a value.
            dtypes: What the writer takes, what the cache is made of, and as what it is read.
            write: The engine's writer.

        Raises:
            UnsupportedModelError: the order is not one of whole numbers.
        """
        given, stored, read = dtypes
        size = block * dim
        places = torch.arange(size)
        numbers = places.view(block, 1, dim).expand(block, n_heads, dim)
        found = torch.zeros(2, size, dtype=torch.int64)
        power = 1
        while power < size:
            digit = (numbers // power % _BASE).to(given).contiguous()
            cache = torch.zeros(1, n_heads, block, 2 * dim, dtype=stored)
            write(digit, digit.clone(), cache, torch.arange(block))
            found += cache.view(read).view(n_heads, 2, size)[0].float().round().long() * power
            power *= _BASE
        if not (found.sort(1).values == places).all():
            raise UnsupportedModelError(
                "the CPU attention of this vLLM stores a block in an order that is not known; millpond cannot move its "
                "entries here: run without millpond, or report the processor and the version of vLLM"
            )
        keys_at, values_at = found.argsort(1)
        return cls(keys_at, values_at, block)

    def read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """See `CacheLayout.read`."""
        parts = self._parts(cache)[blocks]
        return self._ordered(parts[:, :, 0], self.keys_at), self._ordered(parts[:, :, 1], self.values_at)

    def read_keys(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """See `CacheLayout.read_keys`."""
        return self._ordered(self._parts(cache)[:, :, 0][blocks], self.keys_at)

    def keys(self, cache: Tensor) -> tuple[Tensor, KeyOrder]:
        """See `CacheLayout.keys`.

        Raises:
            UnsupportedModelError: tokens and channels are mixed in the order.
        """
        return self._parts(cache)[:, :, 0], self._key_order

    @cached_property
    def _key_order(self) -> KeyOrder:
        try:
            return KeyOrder.of(self.keys_at.view(self.block, -1))
        except OptionError as error:
            raise UnsupportedModelError(f"millpond: {error}, so no attention can be summed here; use snapkv") from error

    @staticmethod
    def _parts(cache: Tensor) -> Tensor:
        """Return (blocks, H, 2, block size * D): keys and values of each head of each block."""
        n_blocks, n_heads, block, width = cache.shape
        return cache.view(n_blocks, n_heads, 2, block * width // 2)

    def _ordered(self, part: Tensor, at: Tensor) -> Tensor:
        """Return (H, n * block size, D) of parts (n, H, block size * D)."""
        n, n_heads, size = part.shape
        ordered = part[..., at].view(n, n_heads, self.block, size // self.block)
        return ordered.transpose(0, 1).reshape(n_heads, n * self.block, size // self.block)

    def write(self, cache: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `CacheLayout.write`."""
        n, (_, n_heads, block, width) = len(blocks), cache.shape
        parts = torch.empty(n, n_heads, 2, block * width // 2, dtype=cache.dtype)
        for index, (rows, at) in enumerate(((keys, self.keys_at), (values, self.values_at))):
            own = rows.reshape(n_heads, n, block * width // 2).transpose(0, 1)
            parts[:, :, index, at] = own
        cache[blocks] = parts.view(n, n_heads, block, width)


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """(blocks, H, block size, key_dim + value_dim) of GPU kernels: an entry's key, then its value.

    Where heads or tokens come first in memory is in the strides alone. Kernels with smaller blocks divide one of the
    manager into equal parts, which follow each other.

    Attributes:
        key_dim: Width of a key.
        parts: Blocks of the kernel in one of the manager.
    """

    key_dim: int
    parts: int = 1

    def read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """See `CacheLayout.read`."""
        part = _movable(cache).index_select(0, self._of_kernel(blocks))
        rows = part.transpose(0, 1).flatten(1, 2).view(cache.dtype)
        return rows[..., : self.key_dim], rows[..., self.key_dim :]

    def write(self, cache: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `CacheLayout.write`."""
        rows = _movable(torch.cat([keys, values], 2))
        index = self._of_kernel(blocks)
        _movable(cache)[index] = rows.view(len(rows), len(index), cache.shape[2], -1).transpose(0, 1)

    def read_keys(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """See `CacheLayout.read_keys`."""
        part = _movable(cache)[..., : self.key_dim].index_select(0, self._of_kernel(blocks))
        return part.transpose(0, 1).flatten(1, 2).view(cache.dtype)

    def keys(self, cache: Tensor) -> tuple[Tensor, KeyOrder]:
        """See `CacheLayout.keys`; what lies between the keys of a head, in memory, lies between them here."""
        blocks, n_heads, tokens, _ = cache.shape
        by_block, by_head, by_token, _ = cache.stride()
        order = _strided_order(self.parts, tokens, self.key_dim, by_block, by_token, cache.device)
        width = (self.parts - 1) * by_block + (tokens - 1) * by_token + self.key_dim
        shape, strides = (blocks // self.parts, n_heads, width), (self.parts * by_block, by_head, 1)
        return cache.as_strided(shape, strides, cache.storage_offset()), order

    def _of_kernel(self, blocks: Tensor) -> Tensor:
        """Return the kernel's blocks of the manager's."""
        if self.parts == 1:
            return blocks
        return (blocks[:, None] * self.parts + torch.arange(self.parts, device=blocks.device)).flatten()


@lru_cache(maxsize=8)
def _strided_order(
    parts: int, tokens: int, key_dim: int, by_block: int, by_token: int, device: torch.device
) -> KeyOrder:
    """Return the order of keys of `parts` blocks of `tokens`, each number of a key beside the one before."""
    part, token, number = torch.arange(parts), torch.arange(tokens), torch.arange(key_dim)
    at = part[:, None, None] * by_block + token[:, None] * by_token + number
    order = KeyOrder.of(at.flatten(0, 1))
    return KeyOrder(order.row_at.to(device), order.column_at.to(device), order.neighbours)


def dtype_of_bytes(name: str) -> torch.dtype | None:
    """Return the dtype of a cache's numbers of 8 bits, by the name that vLLM gives it; None for wider ones."""
    if not name.startswith("fp8"):
        return None
    return torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn


def _movable(part: Tensor) -> Tensor:
    """Return a part of a cache in a dtype that can be indexed; numbers of 8 bits move as bytes."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part
