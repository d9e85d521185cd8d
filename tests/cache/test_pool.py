"""The page pool: growth, limits, bytes."""

import numpy as np
import pytest
import torch

from millpond.cache.pages.pool import PagePool
from millpond.errors import OptionError, PoolFullError
from millpond.kernels.pages import PageArrays


def make_pool(**kwargs: object) -> PagePool:
    return PagePool(8, 4, torch.float32, slots=16, **kwargs)  # type: ignore[arg-type]


def test_bytes_are_summed_from_real_buffers() -> None:
    pool = make_pool()
    pool.allocate(3)
    arrays = pool.arrays
    buffers = [*arrays.keys, *arrays.values, *arrays.positions, *arrays.scores]
    assert pool.nbytes == sum(t.untyped_storage().nbytes() for t in buffers)
    assert pool.kv_bytes_per_page == 16 * (8 + 4) * 4
    assert pool.page_bytes == pool.kv_bytes_per_page + 16 * 8


def test_masses_are_counted() -> None:
    plain, pool = make_pool(), make_pool(masses=True)
    assert plain.arrays.log_masses == []
    assert pool.kv_bytes_per_page == plain.kv_bytes_per_page
    assert pool.page_bytes == plain.page_bytes + 16 * 4 == pool.kv_bytes_per_page + 16 * 12
    pool.allocate(3)
    buffers = [tensor for arenas in pool.arrays.arrays for tensor in arenas]
    assert len(buffers) == 5
    assert pool.nbytes == sum(t.untyped_storage().nbytes() for t in buffers) == pool.n_pages * pool.page_bytes


def test_masses_count_towards_the_limit() -> None:
    limit = 12 * make_pool().page_bytes
    pool = make_pool(limit_bytes=limit, masses=True)
    assert pool.max_pages == limit // pool.page_bytes == 11
    pool.allocate(11)
    assert pool.nbytes <= limit
    with pytest.raises(PoolFullError):
        pool.allocate(1)


def test_private_copies_carry_masses() -> None:
    pool = make_pool(masses=True)
    ids = pool.allocate(1)
    pool.retain(ids)
    for arenas in pool.arrays.arrays:
        arenas[0].fill_(3)
    pool.arrays.log_masses[0][ids[0]] = 7.0
    copy = pool.privatise(ids)
    assert copy[0] != ids[0]
    assert (pool.arrays.log_masses[0][copy[0]] == 7.0).all()


def test_growth_does_not_move_live_pages() -> None:
    pool = make_pool()
    pool.allocate(1)
    address = pool.arrays.keys[0].data_ptr()
    pool.allocate(2 * pool.arrays.pages_per_arena)
    assert pool.arrays.n_arenas >= 2
    assert pool.arrays.keys[0].data_ptr() == address
    assert pool.arrays.bases[0, 0].item() == address


def test_lowest_free_pages_go_out_first_as_neighbours() -> None:
    pool = make_pool()
    first = pool.allocate(6)
    assert first.tolist() == list(range(6))
    pool.release(first[2:4])
    assert pool.allocate(3).tolist() == [2, 3, 6]


def test_limit_is_hard_and_nothing_is_lost() -> None:
    pool = make_pool(limit_bytes=10 * make_pool().page_bytes)
    held = pool.allocate(8)
    with pytest.raises(PoolFullError, match=r"3 pages .* 8 of at most 10 .*stays readable"):
        pool.allocate(3)
    assert pool.n_live == 8
    assert pool.nbytes <= 10 * pool.page_bytes
    pool.release(held)
    assert len(pool.allocate(10)) == 10
    pool.check_integrity()


def test_trim_gives_memory_back() -> None:
    pool = make_pool()
    step = pool.arrays.pages_per_arena
    kept = pool.allocate(1)
    rest = pool.allocate(2 * step)
    before = pool.nbytes
    pool.release(rest)
    freed = pool.trim()
    assert freed > 0
    assert pool.nbytes == before - freed
    assert pool.n_pages == step
    pool.release(kept)
    pool.trim()
    assert pool.nbytes == 0


def test_privatise_copies_only_what_others_hold() -> None:
    pool = make_pool()
    mine = pool.allocate(2)
    pool.arrays.keys[0][int(mine[0])] = 7.0
    pool.retain(mine[:1])
    private = pool.privatise(mine)
    assert private[0] != mine[0]
    assert private[1] == mine[1]
    assert (pool.arrays.keys[0][int(private[0])] == 7.0).all()
    assert pool.refs(mine).tolist() == [1, 1]


@pytest.mark.parametrize("slots", [0, 3, 48])
def test_slots_must_be_a_power_of_two(slots: int) -> None:
    with pytest.raises(OptionError, match="power of two"):
        PagePool(8, 8, torch.float32, slots=slots)


def test_limit_below_one_page() -> None:
    with pytest.raises(OptionError, match="smaller than one page"):
        make_pool(limit_bytes=100)


def test_misuse_is_caught() -> None:
    pool = make_pool()
    ids = pool.allocate(1)
    pool.release(ids)
    with pytest.raises(AssertionError, match="free page"):
        pool.release(ids)
    with pytest.raises(AssertionError, match="free page"):
        pool.retain(np.array([0], dtype=np.int32))


def test_addresses_are_written_once_however_many_arenas_come_or_go(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, writes = make_pool(), []
    write = type(pool.arrays)._write_bases

    def counted(arrays: PageArrays) -> None:
        writes.append(arrays.n_arenas)
        write(arrays)

    monkeypatch.setattr(type(pool.arrays), "_write_bases", counted)
    ids = pool.allocate(20 * pool.arrays.pages_per_arena)
    assert writes == [20]
    pool.release(ids)
    pool.trim()
    assert writes == [20, 0]
