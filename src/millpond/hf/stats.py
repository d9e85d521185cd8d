"""Statistics of a cache, measured from its buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.table_bytes import own_bytes, used_bytes
from millpond.hf.fork import pages_of

if TYPE_CHECKING:
    from millpond.cache.layer.layer_storage import LayerStorage
    from millpond.hf.protocol import LayerCaches


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts and bytes of a cache, measured from its buffers.

    Attributes:
        seen: Tokens processed, per sequence.
        stored: Entries held, by layer (that has attention), sequence and KV head.
        evicted: Entries evicted, over all layers, sequences and heads.
        kv_bytes: Bytes of keys and values in the pages in use, unused slots included.
        layer_kv_bytes: Bytes of `kv_bytes` of each layer of `stored`. Pages that sequences of the cache share count
            once.
        layer_formats: Name of the format of each layer's entries.
        layer_tier_bytes: Bytes of `layer_kv_bytes` of each layer by the format of the pages: plain numbers, then codes,
            of each tier by age.
        unused_bytes: Bytes of `kv_bytes` in slots without an entry: pages are allocated as a whole.
        metadata_bytes: Bytes of positions, scores and tables that belong to them.
        full_kv_bytes: Bytes of keys and values of all tokens seen, in the model's dtype and without pages.
        reserved_bytes: Bytes of all pool buffers, free pages included.
        bits_per_element: Bits of one number of a stored key or value, unused slots included.
        entry_layers: Numbers in the model of the layers that hold entries, in the order of `stored`.
        state_layers: Numbers of those that hold a recurrent or convolution state, in a hybrid; a layer may be both.
        shared_layers: For the number of a layer that holds nothing, the number of the layer whose entries it reads
            (Gemma 3n).
        state_bytes: Bytes of these states, which have one size however long the text is and are in no other count.
        gate_bytes: Bytes of the contexts of trained gates (`attention_gate`), in no other count.
        outside_bytes: Bytes of keys and values in host memory or in files, of blocks that have left the pages
            (`infllm`), in no other count.
    """

    seen: list[int]
    stored: list[list[list[int]]]
    evicted: int
    kv_bytes: int
    layer_kv_bytes: list[int]
    layer_formats: list[str]
    layer_tier_bytes: list[dict[str, int]]
    unused_bytes: int
    metadata_bytes: int
    full_kv_bytes: int
    reserved_bytes: int
    bits_per_element: float
    entry_layers: list[int]
    state_layers: list[int]
    shared_layers: dict[int, int]
    state_bytes: int
    gate_bytes: int
    outside_bytes: int


def measure(cache: LayerCaches) -> CacheStats:
    """Return the counts and bytes of a cache in its current state.

    Pages that it shares with forks count in each.
    """
    stored = [layer_cache.stored for layer_cache in cache.layer_caches]
    seen = cache.tracker.seen
    entries = sum(int(seen.sum()) * s.shape[1] for s in stored if s.size)
    tables = [layer_cache.table for layer_cache in cache.layer_caches if layer_cache.table is not None]
    full = numbers = 0
    for table in tables:
        wide = table.pool.arrays.key_dim + table.pool.arrays.value_dim
        full += int(seen.sum()) * table.n_kv_heads * wide * cache.dtype.itemsize
        numbers += int(table.entries().sum()) * wide
    live_pages = [(pool, pool.n_live if len(cache.kin) == 1 else pages_of(cache, pool)) for pool in cache.pools]
    kv_bytes = sum(n * pool.kv_bytes_per_page for pool, n in live_pages)
    return CacheStats(
        seen=[int(n) for n in seen],
        stored=[s.tolist() for s in stored],
        evicted=entries - sum(int(s.sum()) for s in stored),
        kv_bytes=kv_bytes,
        layer_kv_bytes=[_layer_bytes(layer_cache.table) for layer_cache in cache.layer_caches],
        layer_formats=[_format(layer_cache.table) for layer_cache in cache.layer_caches],
        layer_tier_bytes=[_tier_bytes(layer_cache.table) for layer_cache in cache.layer_caches],
        unused_bytes=max(0, kv_bytes - sum(int(used_bytes(table).sum()) for table in tables)),
        metadata_bytes=sum(own_bytes(table) for table in tables)
        + sum(n * (pool.page_bytes - pool.kv_bytes_per_page) for pool, n in live_pages),
        full_kv_bytes=full,
        reserved_bytes=sum(pool.nbytes for pool in cache.pools),
        bits_per_element=8 * kv_bytes / numbers if numbers else 0.0,
        entry_layers=list(cache.entry_layers),
        state_layers=list(cache.states.layers),
        shared_layers=dict(cache.shared_layers),
        state_bytes=cache.states.nbytes(),
        gate_bytes=sum(layer_cache.sequence_state.context_bytes for layer_cache in cache.layer_caches),
        outside_bytes=sum(_outside(layer_cache) for layer_cache in cache.layer_caches),
    )


def _outside(layer_cache: LayerStorage) -> int:
    selective = layer_cache.sequence_state.selective
    return 0 if selective is None else selective.bytes_outside


def _layer_bytes(table: PageTable | None) -> int:
    """Return the bytes of keys and values in the pages that a layer holds, each page once."""
    if table is None:
        return 0
    return sum(_tier_bytes(table).values())


def _tier_bytes(table: PageTable | None) -> dict[str, int]:
    """Return the bytes of `_layer_bytes` by the format of the pages, plain numbers first."""
    if table is None:
        return {}
    plain_bytes = {str(table.pool.arrays.dtype).removeprefix("torch."): _page_bytes(table)}
    return plain_bytes | {part.codec.name: _page_bytes(part) for part in table.packed_parts}


def _page_bytes(part: PageTable | QuantizedStore) -> int:
    return len(np.unique(part.held())) * part.pool.kv_bytes_per_page


def _format(table: PageTable | None) -> str:
    """Return the name of the format of a layer's entries; "" before the first token."""
    if table is None:
        return ""
    return (
        str(table.pool.arrays.dtype).removeprefix("torch.") if table.quantized is None else table.quantized.codec.name
    )
