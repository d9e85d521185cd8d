"""check_pages: every page of an engine has its holders, within the limit."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.cache.batch_cache import BatchCache
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.prefix_tree import PrefixTree
from millpond.cache.state.recurrent_states import StateSlots
from millpond.cache.swap.pages import Holder
from millpond.cache.tiered.away_pages import AwayPages


def check_pages(account: MemoryLimit, stacks: Iterable[BatchCache], shared: PrefixTree) -> None:
    """Assert that every page is held by exactly the caches and the shared prompts that name it, within the limit."""
    stacks = list(stacks)
    tables = [core.table for stack in stacks for core in stack.layers if core.table is not None]
    parts: list[Holder] = [*tables, *(table.sealed for table in tables if table.sealed is not None)]
    for pool in account.pools:
        if isinstance(pool, StateSlots):
            pool.check_integrity(sum(stack.n_seq for stack in stacks if not stack.is_swapped_out))
            continue
        assert isinstance(pool, RefCountedPool), "nothing else shares the limit"
        held = [part.held() for part in parts if part.page_lists.pool is pool]
        held += [away.staying for away in account.pools if isinstance(away, AwayPages) and away.pool is pool]
        pool.check_integrity(held + shared.held(pool))
    limit = account.limit_bytes
    assert limit is None or account.nbytes <= limit, "more bytes than the limit"
