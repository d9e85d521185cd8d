"""Forks of a cache: several caches that continue from one text."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.hf.grad_mode import no_autograd
from millpond.hf.protocol import LayerCaches
from millpond.hf.signals.reconstruction import PromptReconstruction
from millpond.hf.signals.token_entropy import TokenEntropyHook


class ForkableCache(LayerCaches, Protocol):
    """Cache with the state that some policies keep in addition to its layers.

    Attributes:
        entropies: Entropies of tokens, for SirLLM.
        rebuilder: Second pass over a prompt, for KVzip.
    """

    entropies: TokenEntropyHook | None
    rebuilder: PromptReconstruction | None


@no_autograd
def share(cache: ForkableCache, other: ForkableCache) -> None:
    """Let `other`, an empty cache of the same kind and pools, take the position of `cache`.

    Pages are shared; a page that one of the two writes is copied first.
    """
    cache.draft_rollback.commit()
    other.draft_rollback.truncatable = cache.draft_rollback.truncatable
    if cache.entropies is not None:
        cache.entropies.tell()
    other.tracker.become(cache.tracker)
    sequences = list(range(cache.tracker.n_seq))
    for layer_cache, other_layer in zip(cache.layer_caches, other.layer_caches, strict=True):
        if layer_cache.table is not None:
            layer_cache.copy_to(sequences, other_layer)
        other_layer.columns = layer_cache.columns
    other.states.become(cache.states)
    other.text = cache.text.copy()
    if cache.rebuilder is not None and other.rebuilder is not None:
        other.rebuilder.adopt(cache.rebuilder.done)
    if cache.entropies is not None and other.entropies is not None:
        other.entropies.become(cache.entropies)
    # pages of pools that others hold too go back when the cache is forgotten, as they do when it is closed
    for shared in (cache, other):
        finalizer = weakref.finalize(shared, give_back, shared.layer_caches)
        finalizer.atexit = False


def check_pages(caches: Iterable[LayerCaches]) -> None:
    """Assert that every page is held by exactly the tables that name it.

    The caches share pools.
    """
    tables = [
        layer_cache.table for cache in caches for layer_cache in cache.layer_caches if layer_cache.table is not None
    ]
    parts: list[PageTable | QuantizedStore] = [*tables, *(part for table in tables for part in table.packed_parts)]
    for pool in {pool for cache in caches for pool in cache.pools}:
        pool.check_integrity([part.held() for part in parts if part.pool is pool])


def pages_of(cache: LayerCaches, pool: RefCountedPool[Any]) -> int:
    """Return the pages of a pool that one of several caches holds, shared ones included."""
    tables = [layer_cache.table for layer_cache in cache.layer_caches if layer_cache.table is not None]
    parts: list[PageTable | QuantizedStore] = [*tables, *(part for table in tables for part in table.packed_parts)]
    page_ids = [part.held() for part in parts if part.pool is pool]
    return len(np.unique(np.concatenate(page_ids))) if page_ids else 0


def give_back(layer_caches: list[LayerCache]) -> None:
    """Free the pages of a deleted cache."""
    for layer_cache in layer_caches:
        layer_cache.reset()
