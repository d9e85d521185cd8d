"""Checks of the pages of an engine: each has its holders, within the limit, and inexact ones are not shared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from millpond.cache.batch_cache import BatchCache
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.pages.tier_limits import TierLimits
from millpond.cache.prefix_tree import PrefixTree
from millpond.cache.state.recurrent_states import StateSlots
from millpond.cache.swap import Holder
from millpond.cache.tiered.offloaded_pages import OffloadedPages
from millpond.engine.components import Components


def check_engine(parts: Components) -> None:
    """Assert that exactly the caches that name a page hold it, within the limit."""
    groups = dict.fromkeys([*parts.decode_groups.groups, *(state.group for state in parts.requests)])
    batch_caches = [group.batch_cache for group in groups]
    batch_caches += [state.private_cache for state in parts.requests if state.private_cache is not None]
    _check_pages(parts.memory, batch_caches, parts.prefix_cache.trees)
    tainted = [holder for state in parts.requests if state.tainted and (holder := state.cache()) is not None]
    _check_untainted(tainted, parts.prefix_cache.tree)


def _check_pages(memory_limit: MemoryLimit, batch_caches: Iterable[BatchCache], trees: Sequence[PrefixTree]) -> None:
    """Assert that a page is held by exactly the caches and shared prompts that name it."""
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
        if any(pool is shared.sum_memory or (shared.codes and pool is shared.codes.memory) for shared in trees):
            continue
        assert isinstance(pool, RefCountedPool), "nothing else shares the limit"
        held = [part.held() for part in parts if part.page_lists.pool is pool]
        offloaded = [pages for pages in memory_limit.pools if isinstance(pages, OffloadedPages)]
        held += [pages.residents for pages in offloaded if pages.pool is pool]
        pool.check_integrity(held + [ids for shared in trees for ids in shared.held_in(pool)])
    for shared in trees:
        shared.check_sums()
    limit = memory_limit.limit_bytes
    assert limit is None or memory_limit.nbytes <= limit or isinstance(memory_limit, TierLimits), (
        "more bytes than the limit"
    )
    assert not isinstance(memory_limit, TierLimits) or memory_limit.within, "more bytes than a tier has"


def _check_untainted(tainted: Iterable[tuple[BatchCache, int]], shared: PrefixTree) -> None:
    """Assert that no page of the prefix tree comes from a prompt that used a chunk store."""
    for batch_cache, sequence in tainted:
        for layer_cache in batch_cache.layers:
            if layer_cache.table is not None and not layer_cache.table.is_offloaded:
                lists, rows = layer_cache.table.page_lists, layer_cache.table.rows(sequence)
                held = shared.held_in(layer_cache.table.pool)
                shared_pages = (
                    np.intersect1d(lists.held(rows), np.concatenate([ids.ravel() for ids in held])) if held else ()
                )
                assert len(shared_pages) == 0, "an approximate page in the prefix tree"
