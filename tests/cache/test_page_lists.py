"""PageRows against lists of ids: who holds what, and nothing is lost or freed twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millpond.cache.pages.page_lists import PageLists
from millpond.cache.pages.pool import PagePool
from millpond.errors import PoolFullError

N = 3


def pool_of(pages: int | None = None) -> PagePool:
    """A pool of small pages, of at most `pages`."""
    pool = PagePool(8, 8, torch.float32, slots=4)
    return pool if pages is None else PagePool(8, 8, torch.float32, slots=4, limit_bytes=pages * pool.page_bytes)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def lists(rows: PageLists) -> list[list[int]]:
    return [rows.held(slice(r, r + 1)).tolist() for r in range(len(rows.owned))]


moves = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.lists(st.integers(0, 3), min_size=N, max_size=N)),
        st.tuples(st.just("cut"), st.lists(st.integers(0, 5), min_size=N, max_size=N)),
        st.tuples(st.just("drop"), st.lists(st.sets(st.integers(0, 5)), min_size=N, max_size=N)),
        st.tuples(st.just("select"), st.lists(st.integers(0, N - 1), min_size=N, max_size=N)),
        st.tuples(st.just("privatise"), st.none()),
        st.tuples(st.just("away"), st.none()),
        st.tuples(st.just("fork"), st.none()),
        st.tuples(st.just("join"), st.none()),
    ),
    max_size=12,
)


@given(moves=moves)
def test_rows_do_what_lists_do(moves: list[tuple[str, list]]) -> None:  # type: ignore[type-arg]
    pool = pool_of()
    rows, others = PageLists(pool, N), []
    for name, said in moves:
        before, all_rows = lists(rows), np.arange(len(rows.owned))
        if name == "grow":
            more = np.resize(ints(*said), len(all_rows))
            rows.grow(all_rows, more)
            assert [after[: len(old)] for after, old in zip(lists(rows), before, strict=True)] == before
            assert rows.owned.tolist() == [len(old) + n for old, n in zip(before, more.tolist(), strict=True)]
        elif name == "cut":
            keep = np.resize(ints(*said), len(all_rows))
            rows.cut(all_rows, keep)
            assert lists(rows) == [old[:n] for old, n in zip(before, keep.tolist(), strict=True)]
        elif name == "drop":
            chosen = np.zeros((len(all_rows), rows.ids.shape[1]), dtype=bool)
            for row in all_rows:
                chosen[row, [c for c in said[row % N] if c < chosen.shape[1]]] = True
            rows.drop(slice(None), chosen)
            assert lists(rows) == [[p for c, p in enumerate(old) if not chosen[r, c]] for r, old in enumerate(before)]
        elif name == "select":
            rows.select(ints(*said))
            assert lists(rows) == [before[r] for r in said]
        elif name == "privatise":
            assert rows.copy_on_write() == bool(rows.n_shared()) or not rows.may_share
            assert rows.n_shared() == 0
        elif name == "away":
            owned = rows.release_all()
            rows.restore(pool.allocate(int(owned.sum())), owned)
            assert [len(row) for row in lists(rows)] == [len(row) for row in before]
        elif name == "fork":
            others.append(rows.fork())
            assert lists(others[-1]) == lists(rows) == before
        elif others:
            rows.join(other := others.pop())
            assert not other.held().size
        pool.check_integrity([rows.held(), *(other.held() for other in others)])
    for each in (rows, *others):
        each.clear()
    assert pool.n_live == 0


def test_a_write_copies_only_what_it_writes_and_others_hold() -> None:
    pool = pool_of()
    rows = PageLists(pool, 2)
    rows.grow(ints(0, 1), ints(2, 1))
    other = rows.fork()
    last = rows.columns == ints(1, 0)[:, None]
    assert (rows.n_shared(), rows.n_shared(last)) == (3, 2)
    assert rows.copy_on_write(last)
    assert [a == b for a, b in zip(rows.held(), other.held(), strict=True)] == [True, False, False]
    assert rows.may_share
    other.clear()
    assert not rows.copy_on_write(last)
    assert not rows.may_share


def test_a_full_pool_changes_nothing() -> None:
    pool = pool_of(2)
    rows = PageLists(pool, 2)
    rows.grow(ints(0, 1), ints(1, 1))
    with pytest.raises(PoolFullError):
        rows.grow(ints(0), ints(1))
    other = rows.fork()
    with pytest.raises(PoolFullError):
        other.copy_on_write()
    assert lists(rows) == lists(other) == [[0], [1]]
    pool.check_integrity([rows.held(), other.held()])
