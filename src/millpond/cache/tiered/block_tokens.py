"""Tokens of blocks of a prefix tree, layer by layer: out of pages and into pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.swap import Content, read_pages, write_pages
from millpond.cache.tiered.block_store import Pools
from millpond.codec.basis import Basis


class LayerTokens(NamedTuple):
    """Tokens of one layer that follow one another in a text."""

    keys: Tensor  #: (H, n, D) after RoPE
    values: Tensor  #: (H, n, V)
    scores: Tensor | None  #: (H, n) float32; None: all are 0


@dataclass(frozen=True, slots=True, eq=False)
class PoolContent:
    """Content of the pages of some blocks in one pool.

    Attributes:
        layers: Layers with pages there.
        shape: Number of these, of blocks, and of KV heads.
        content: Arrays of the pages.
    """

    layers: list[int]
    shape: tuple[int, ...]
    content: Content


def _by_pool(pools: Pools) -> list[tuple[RefCountedPool[Any], list[int]]]:
    """Return each pool with its layers."""
    return [(pool, [layer for layer, own in enumerate(pools) if own is pool]) for pool in dict.fromkeys(pools)]


def copy_blocks(pools: Pools, blocks: Sequence[Sequence[PageIds]]) -> list[PoolContent]:
    """Copy the pages of blocks that follow one another; `as_tokens` makes tokens of them.

    Args:
        pools: Pool of each layer.
        blocks: Pages of each layer, of each block.
    """
    found = []
    for pool, layers in _by_pool(pools):
        ids = np.stack([[block[layer] for block in blocks] for layer in layers])
        found.append(PoolContent(layers, ids.shape, read_pages(pool, ids.ravel())))
    return found


def as_tokens(copies: Sequence[PoolContent]) -> list[LayerTokens]:
    """Return the tokens of copied blocks, of each layer."""
    found: dict[int, LayerTokens] = {}
    for copy in copies:
        keys, values, _, scores, *_ = (x.view(*copy.shape, *x.shape[1:]) for x in copy.content)
        for layer, *parts in zip(copy.layers, keys, values, scores, strict=True):
            own_keys, own_values, own_scores = (part.transpose(0, 1).flatten(1, 2) for part in parts)
            found[layer] = LayerTokens(own_keys, own_values, own_scores)
    return [found[layer] for layer in range(len(found))]


def read_tokens(pools: Pools, blocks: Sequence[Sequence[PageIds]]) -> list[LayerTokens]:
    """Return the tokens of blocks that follow one another, of each layer; see `copy_blocks`."""
    return as_tokens(copy_blocks(pools, blocks))


def as_pages(pools: Pools, layers: Sequence[LayerTokens], slots: int, first: int) -> list[list[PoolContent]]:
    """Return the content of the pages of blocks, for each block what `write_block` takes.

    Args:
        pools: Pool of each layer.
        layers: Tokens of each layer.
        slots: Tokens of a block.
        first: Position of the first token.
    """
    n = layers[0].keys.shape[1] // slots
    blocks: list[list[PoolContent]] = [[] for _ in range(n)]
    for pool, own in _by_pool(pools):
        dtype, device = pool.arrays.dtype, pool.arrays.device
        parts = [layers[layer] for layer in own]
        keys, values = (
            _by_block(torch.stack(sides), n).to(device, dtype)
            for sides in ([part.keys for part in parts], [part.values for part in parts])
        )
        shape = keys.shape[:4]  # blocks, layers, heads, slots
        positions = torch.arange(first, first + n * slots, dtype=torch.int32, device=device).view(n, 1, 1, slots)
        positions = positions.expand(shape).contiguous()
        scores = torch.zeros(shape, device=device)
        for number, part in enumerate(parts):
            if part.scores is not None:
                scores[:, number] = _by_block(part.scores[None], n)[:, 0].to(scores)
        for number, block in enumerate(blocks):
            content = tuple(x[number].flatten(0, 1) for x in (keys, values, positions, scores))
            block.append(PoolContent(own, tuple(shape[1:3]), content))
    return blocks


def _by_block(x: Tensor, n: int) -> Tensor:
    """Return (layers, heads, n * slots, ...) as (n, layers, heads, slots, ...)."""
    return torch.stack(x.chunk(n, 2)) if n > 1 else x[None]


def write_block(pools: Pools, pages: Sequence[PageIds], contents: Sequence[PoolContent]) -> None:
    """Write a block of `as_pages` to its pages.

    Args:
        pools: Pool of each layer.
        pages: Pages of each layer.
        contents: What to write.
    """
    for content in contents:
        ids = np.concatenate([pages[layer] for layer in content.layers])
        write_pages(pools[content.layers[0]], ids, content.content)


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
