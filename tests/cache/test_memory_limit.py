"""Pools that share one limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool import PagePool
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.pages.repack import spare_pages
from millpond.errors import PoolFullError


def two(limit: int | None) -> tuple[MemoryLimit, PagePool, PagePool]:
    memory_limit = MemoryLimit(limit)
    wide, narrow = (PagePool(n, n, torch.float32, "cpu", slots=4, memory_limit=memory_limit) for n in (8, 4))
    return memory_limit, wide, narrow


def test_what_one_pool_has_free_goes_to_the_other() -> None:
    memory_limit, wide, narrow = two(64_000)
    ids = wide.allocate(60_000 // wide.page_bytes)
    assert not narrow.can_allocate(60_000 // narrow.page_bytes)
    with pytest.raises(PoolFullError):
        narrow.allocate(60_000 // narrow.page_bytes)
    wide.release(ids)
    held = narrow.allocate(60_000 // narrow.page_bytes)
    assert memory_limit.nbytes <= 64_000
    narrow.release(held)


def test_without_a_limit_everything_fits() -> None:
    memory_limit, wide, _ = two(None)
    assert memory_limit.can_take({wide: 10**9})


def test_pages_of_several_pools_are_weighed_together() -> None:
    memory_limit, wide, narrow = two(64_000)
    most = {pool: 64_000 // pool.page_bytes for pool in (wide, narrow)}
    assert memory_limit.can_take({wide: most[wide]})
    assert memory_limit.can_take({narrow: most[narrow]})
    assert not memory_limit.can_take({wide: most[wide], narrow: most[narrow]})


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.booleans()), max_size=40), st.integers(10_000, 90_000))
def test_the_limit_is_kept_and_what_fits_is_given(steps: list[tuple[bool, int, bool]], limit: int) -> None:
    memory_limit, wide, narrow = two(limit)
    held: list[tuple[PagePool, torch.Tensor]] = []
    for first, n, give_back in steps:
        pool = wide if first else narrow
        if give_back and held:
            other, ids = held.pop(0)
            other.release(ids)
        if memory_limit.can_take({pool: n}):
            held.append((pool, pool.allocate(n)))
        else:
            with pytest.raises(PoolFullError):
                pool.allocate(n)
        assert memory_limit.live_bytes <= memory_limit.nbytes <= limit
        for one in (wide, narrow):
            one.check_integrity([ids for owner, ids in held if owner is one])
    for pool, ids in held:
        pool.release(ids)
        pool.trim()
    for pool in (wide, narrow):
        pool.trim()
    assert memory_limit.nbytes == 0


class Holder:
    """Some pages of a pool, each with its number written into it."""

    def __init__(self, pool: PagePool, n: int, number: int) -> None:
        self.pool, self.ids, self.number = pool, pool.allocate(n), number
        pool.holders.add(self)
        for at, page in enumerate(self.ids.tolist()):
            arena, row = divmod(page, pool.arrays.pages_per_arena)
            pool.arrays.scores[arena][row] = 1000 * number + at

    def held_in(self, pool: RefCountedPool[Any]) -> list[PageIds]:
        return [self.ids] if pool is self.pool else []

    def follow(self, pool: RefCountedPool[Any], places: PageIds) -> None:
        if pool is self.pool:
            self.ids = places[self.ids]

    def check(self) -> None:
        for at, page in enumerate(self.ids.tolist()):
            arena, row = divmod(page, self.pool.arrays.pages_per_arena)
            assert (self.pool.arrays.scores[arena][row] == 1000 * self.number + at).all(), "a page lost its content"


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 30)), max_size=40), st.integers(10_000, 90_000)
)
def test_room_is_made_wherever_the_free_pages_lie(steps: list[tuple[bool, int, int]], limit: int) -> None:
    """What is free goes to the pool that needs it, to the page, and what is in use keeps its content."""
    memory_limit, wide, narrow = two(limit)
    held: list[Holder] = []
    for number, (first, n, gone) in enumerate(steps):
        pool = wide if first else narrow
        if gone < len(held):
            held[gone].pool.release(held[gone].ids)
            del held[gone]
        fits = memory_limit.live_bytes + n * pool.page_bytes <= limit
        assert memory_limit.make_room({pool: n}) == fits
        if fits:
            held.append(Holder(pool, n, number))
        assert memory_limit.live_bytes <= memory_limit.nbytes <= limit
        for one in (wide, narrow):
            one.check_integrity([holder.ids for holder in held if holder.pool is one])
        for holder in held:
            holder.check()


def test_pages_that_are_needed_are_not_spare() -> None:
    _, wide, _ = two(64_000)
    ids = wide.allocate(20)
    wide.release(ids[:8])
    assert spare_pages(wide, 0) == wide.n_free >= 8
    assert spare_pages(wide, 3) == wide.n_free - 3
    assert spare_pages(wide, wide.n_free + 1) == 0


def test_pages_of_unknown_holders_stay() -> None:
    memory_limit, wide, narrow = two(64_000)
    ids = wide.allocate(60_000 // wide.page_bytes)
    for page in ids.tolist():
        wide.arrays.scores[page // wide.arrays.pages_per_arena][page % wide.arrays.pages_per_arena] = page
    wide.release(ids[::2])
    half = 30_000 // narrow.page_bytes
    assert not memory_limit.make_room({narrow: half}), "nobody would tell the holder where its pages are"
    for page in ids[1::2].tolist():
        assert (
            wide.arrays.scores[page // wide.arrays.pages_per_arena][page % wide.arrays.pages_per_arena] == page
        ).all()
    holder = Holder(narrow, 1, 0)
    holder.pool, holder.ids = wide, ids[1::2]
    wide.holders.add(holder)
    assert memory_limit.make_room({narrow: half})
    assert (np.sort(holder.ids) != ids[1::2]).any()
