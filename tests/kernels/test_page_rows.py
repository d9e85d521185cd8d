"""Rows moved between arenas, and runs of pages packed and unpacked: native kernels do what plain torch does."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.kernels import page_rows
from millpond.kernels.args import RunsInBuffer, WantedPages
from millpond.kernels.native import library
from millpond.kernels.native import pages as structs
from millpond.kernels.page_rows import PagePart, RowArrays, move_rows, pack_run, take, unpack_runs
from millpond.kernels.pages import PageArrays
from tests.helpers.examples import examples

PARTS = list(PagePart)
N_PAGES, PER_ARENA = 19, 8
WAYS = ["native", "reference"]


def filled(dtype: torch.dtype, seed: int, masses: bool = True) -> PageArrays:
    """Pages in three arenas, of which the last is shorter."""
    draw = torch.Generator().manual_seed(seed)
    arrays = PageArrays(PER_ARENA, 4, 6, 3, dtype, torch.device("cpu"), masses)
    for n in (PER_ARENA, PER_ARENA, N_PAGES - 2 * PER_ARENA):
        arrays.add_arena(n)
    for arenas in arrays.arrays:
        for arena in arenas:
            arena.copy_(torch.randint(0, 99, arena.shape, generator=draw))
    return arrays


def whole(arrays: PageArrays) -> list[torch.Tensor]:
    return [torch.cat(arenas) for arenas in arrays.arrays]


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "reference" and library.load() is None:
        pytest.skip("installed without native kernels")
    monkeypatch.setenv("MILLPOND_KERNELS", "reference" if way == "reference" else "auto")
    assert page_rows.serves() == (way != "reference")
    if way == "native without checksums":
        for name in ("pack", "unpack"):
            monkeypatch.setattr(structs, name, lambda *given: -1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pages_become_others(part: PagePart, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    source, target = filled(dtype, 0), filled(dtype, 1)
    rows, to = np.array([18, 3, 8, 15, 0], dtype=np.int32), np.array([2, 17, 7, 9, 16])
    expected = whole(target)
    for n, (own, other) in enumerate(zip(expected, whole(source), strict=True)):
        if part is PagePart.ALL or (n < 2) == (part is PagePart.CONTENTS):
            own[torch.from_numpy(to)] = other[torch.from_numpy(rows).long()]
    move_rows(RowArrays.of_pages(source, part), rows, RowArrays.of_pages(target, part), to, len(rows))
    assert all(torch.equal(a, b) for a, b in zip(whole(target), expected, strict=True))
    found = take(RowArrays.of_pages(target, part), rows)
    chosen = [
        x
        for x, arenas in zip(expected, target.arrays, strict=True)
        if any(arenas is pieces for pieces in RowArrays.of_pages(target, part).arenas)
    ]
    assert all(torch.equal(a, b[torch.from_numpy(rows).long()]) for a, b in zip(found, chosen, strict=True))
    assert len(found) == len(chosen)


@pytest.mark.parametrize("way", WAYS)
def test_slots_of_pages(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    arrays = filled(torch.bfloat16, 3)
    rows = np.array([4 * 18 + 1, 0, 4 * 7 + 3])
    keys, values = take(RowArrays.of_slots(arrays), rows)
    assert torch.equal(keys, torch.cat(arrays.keys).flatten(0, 1)[torch.from_numpy(rows)])
    assert torch.equal(values, torch.cat(arrays.values).flatten(0, 1)[torch.from_numpy(rows)])
    dense = RowArrays.of_tensors([keys * 2, values * 2])
    move_rows(dense, np.array([2, 0], dtype=np.int32), RowArrays.of_slots(arrays), np.array([5, 6]), 2)
    assert torch.equal(arrays.keys[0].flatten(0, 1)[5:7], 2 * keys[[2, 0]])
    assert torch.equal(arrays.values[0].flatten(0, 1)[5:7], 2 * values[[2, 0]])


def test_other_arenas_are_seen() -> None:
    arrays = filled(torch.float32, 0)
    before = RowArrays.of_pages(arrays, PagePart.ALL)
    assert RowArrays.of_pages(arrays, PagePart.ALL) is before
    n = arrays.nbytes
    arrays.add_arena(2)
    assert len(RowArrays.of_pages(arrays, PagePart.ALL).arenas[0]) == 4
    assert arrays.nbytes > n
    arrays.drop_last_arena()
    assert arrays.nbytes == n == sum(x.nbytes for x in whole(arrays))


def test_nothing_was_ever_held() -> None:
    arrays = PageArrays(8, 4, 6, 3, torch.float32, torch.device("cpu"))
    assert [len(x) for x in take(RowArrays.of_pages(arrays, PagePart.ALL), np.zeros(0, dtype=np.int32))] == [0] * 4


@pytest.mark.parametrize("way", [*WAYS, "native without checksums"])
@settings(max_examples=examples(40))
@given(data=st.data(), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_runs_come_back_and_a_changed_byte_is_seen(
    way: str, data: st.DataObject, lengths: list[int], seed: int
) -> None:
    """Of each run some pages are wanted; with a damaged run what comes before it is there, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        choose(way, patch)
        source, target = filled(torch.bfloat16, seed), filled(torch.bfloat16, seed + 10)
        pages, page_bytes = RowArrays.of_pages(source, PagePart.CONTENTS), 4 * 9 * 2
        rng = np.random.default_rng(seed)
        places, checksums, buffer, ids = [], [], torch.zeros(4096, dtype=torch.uint8), []
        end = data.draw(st.integers(0, 9))
        for n, length in enumerate(lengths):
            own = rng.permutation(N_PAGES)[:length].astype(np.int32)
            spare = data.draw(st.integers(0, 70))
            room = buffer[end : end + length * page_bytes + spare]
            room.fill_(7)
            checksums.append(pack_run(pages, own, room, (1 << 32) + n))
            assert checksums[-1] == zlib.crc32(room.numpy().data[: length * page_bytes], n)
            assert not room[length * page_bytes :].any()
            expected = [torch.cat(x)[torch.from_numpy(own).long()].reshape(-1) for x in (source.keys, source.values)]
            assert torch.equal(room[: length * page_bytes].clone().view(torch.bfloat16), torch.cat(expected))
            places.append(end)
            ids.append(own)
            end += len(room) + data.draw(st.integers(0, 5))
        damaged = data.draw(st.none() | st.integers(0, len(lengths) - 1))
        if damaged is not None:
            buffer[places[damaged] + data.draw(st.integers(0, lengths[damaged] * page_bytes - 1))] ^= 1
        wanted = [rng.permutation(n)[: data.draw(st.integers(0, n))] for n in lengths]
        first = np.cumsum([0, *map(len, wanted)])
        into = rng.permutation(N_PAGES)[: first[-1]] if first[-1] <= N_PAGES else None
        if into is None:
            return
        runs = RunsInBuffer(*map(np.array, (places, lengths, [(1 << 32) + n for n in range(len(lengths))], checksums)))
        before = whole(target)
        done = unpack_runs(
            buffer,
            runs,
            RowArrays.of_pages(target, PagePart.CONTENTS),
            WantedPages(np.concatenate(wanted).astype(np.int64), into.astype(np.int64)),
            first,
        )
        assert done == (len(lengths) if damaged is None else damaged)
        for n in range(done):
            for k in (0, 1):
                before[k][into[first[n] : first[n + 1]]] = whole(source)[k][ids[n][wanted[n]]]
        assert all(torch.equal(a, b) for a, b in zip(whole(target), before, strict=True))
