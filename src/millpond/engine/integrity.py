"""Checks of the pages of an engine: each has its holders, within the limit, and approximate ones are not shared."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from millpond.cache.batch_cache import BatchCache
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.prefix_tree import PrefixTree
from millpond.cache.state.recurrent_states import StateSlots
from millpond.cache.swap import Holder
from millpond.cache.tiered.offloaded_pages import OffloadedPages
from millpond.engine.components import Components


def check_engine(parts: Components) -> None:
    """Assert that every page of an engine is held by exactly the caches that name it, within the limit."""
    groups = dict.fromkeys([*parts.decode_groups.groups, *(state.group for state in parts.requests)])
    batch_caches = [group.batch_cache for group in groups]
    batch_caches += [state.private_cache for state in parts.requests if state.private_cache is not None]
    _check_pages(parts.memory, batch_caches, parts.prefix_cache.tree)
    tainted = [place for state in parts.requests if state.tainted and (place := state.cache()) is not None]
    _check_untainted(tainted, parts.prefix_cache.tree)


def _check_pages(memory_limit: MemoryLimit, batch_caches: Iterable[BatchCache], shared: PrefixTree) -> None:
    """Assert that every page is held by exactly the caches and the shared prompts that name it, within the limit."""
    batch_caches = list(batch_caches)
    tables = [
        layer_cache.table
        for batch_cache in batch_caches
        for layer_cache in batch_cache.layers
        if layer_cache.table is not None
    ]
    parts: list[Holder] = [*tables, *(part for table in tables for part in table.packed_parts)]
    for pool in memory_limit.pools:
        if isinstance(pool, StateSlots):
            pool.check_integrity(
                sum(batch_cache.n_seq for batch_cache in batch_caches if not batch_cache.is_swapped_out)
            )
            continue
        if pool is shared.sum_memory:
            continue
        assert isinstance(pool, RefCountedPool), "nothing else shares the limit"
        held = [part.held() for part in parts if part.page_lists.pool is pool]
        offloaded = [pages for pages in memory_limit.pools if isinstance(pages, OffloadedPages)]
        held += [pages.residents for pages in offloaded if pages.pool is pool]
        pool.check_integrity(held + shared.held_in(pool))
    shared.check_sums()
    limit = memory_limit.limit_bytes
    assert limit is None or memory_limit.nbytes <= limit, "more bytes than the limit"


def _check_untainted(tainted: Iterable[tuple[BatchCache, int]], shared: PrefixTree) -> None:
    """Assert that no page of a sequence whose prompt came in part from a chunk store is in the prefix tree."""
    for batch_cache, sequence in tainted:
        for layer_cache in batch_cache.layers:
            if layer_cache.table is not None and not layer_cache.table.is_offloaded:
                lists, rows = layer_cache.table.page_lists, layer_cache.table.rows(sequence)
                held = shared.held_in(layer_cache.table.pool)
                found = np.intersect1d(lists.held(rows), np.concatenate([ids.ravel() for ids in held])) if held else ()
                assert len(found) == 0, "an approximate page in the prefix tree"
