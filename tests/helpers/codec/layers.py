"""One layer whose entries are quantized, and random tokens for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool_set import PoolSet
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.rope_tables import RopeTables
from millpond.cache.state.positions import PositionTracker
from millpond.codec import Codec, resolve
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from tests.helpers.codec.known import HalfRotation, known

HEADS, KV, DIM = 4, 2, 64
#: Output projections of the query heads: rows of other lengths.
OUTPUTS = torch.randn(HEADS, DIM, 32, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.1, 2, DIM)[:, None]
SHAPE = AttentionShape(scale=DIM**-0.5)


def make(
    codec: str | tuple[str, str],
    method: str = "full",
    budget: int = 10**6,
    *,
    between_chunks: bool = True,
    **options: Any,
) -> LayerCache:
    """A layer over pools of its own."""
    storage, ropes = resolve(codec), None
    if isinstance(storage, Codec):
        storage = known(storage, KV, DIM)
        ropes = RopeTables([HalfRotation()]) if storage.pre_rope else None
    policy = METHODS.get(method)(**options)
    pools = PoolSet(storage, 16, None, masses=policy.mass_bias, ropes=ropes)
    cache = LayerCache(
        0,
        policy,
        lambda *of: budget,
        pools.plain,
        PositionTracker(),
        between_chunks=between_chunks,
        quantized=pools.quantized if isinstance(storage, Codec) else None,
    )
    cache.attention.outputs = lambda: OUTPUTS
    return cache


def tokens(n: int, batch: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (batch, heads, n, DIM); one channel of the keys is large, as in real models."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, HEADS, n, DIM, generator=g)
    k, v = torch.randn(2, batch, KV, n, DIM, generator=g)
    k[..., 3] = 6 * k[..., 3] + 4
    q[..., 3] /= 4
    return q.to(dtype), k.to(dtype), v.to(dtype)


def feed(
    cache: LayerCache, qkv: tuple[Tensor, Tensor, Tensor], first: int, last: int, *, mask: Tensor | None = None
) -> Tensor:
    """Take in the tokens from `first` to `last` in one pass."""
    cache.tracker.begin_pass()
    return cache.attend(*(t[:, :, first:last] for t in qkv), mask, SHAPE)


def decode(cache: LayerCache, qkv: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> list[Tensor]:
    """Take in the tokens from `first` to `last` one by one."""
    return [feed(cache, qkv, t, t + 1) for t in range(first, last)]


def parts(cache: LayerCache) -> tuple[PageTable, QuantizedStore]:
    """The table of a cache and its quantized part."""
    table = cache.table
    assert table is not None
    assert table.quantized is not None
    return table, table.quantized


def positions(cache: LayerCache, sequence: int = 0) -> list[list[int]]:
    """The positions kept, per head."""
    return [[int(p) for p in row if p >= 0] for row in cache.read(sequence).positions]


def codes(quantized: QuantizedStore, sequence: int = 0) -> list[Tensor]:
    """(pages, bytes) uint8 of each head of a sequence: what is quantized, bit by bit without padding.

    Pages must be full.
    """
    arrays, rows = quantized.pool.arrays, quantized.rows(sequence)
    layout, per = arrays.layout, arrays.pages_per_arena
    n = layout.key_offsets.size + layout.value_offsets.size
    own = (quantized.held_by(row).tolist() for row in range(rows.start, rows.stop))
    return [torch.stack([arrays.codes[i // per][i % per, :n] for i in ids]) for ids in own if ids]


def check(cache: LayerCache) -> None:
    """Every page is held by exactly the tables that name it, tombstones are counted, lengths are right."""
    table, quantized = parts(cache)
    table.pool.check_integrity([table.held()])
    quantized.pool.check_integrity([quantized.held()])
    found = quantized.positions(slice(None))
    used = (torch.arange(found.shape[1]) < torch.from_numpy(quantized.lens)[:, None]).to(found.device)
    assert ((found < 0) & used).sum(1).tolist() == quantized.n_evicted.tolist()
    assert table.entries().tolist() == [[len(h) for h in positions(cache, s)] for s in range(table.n_seq)]
