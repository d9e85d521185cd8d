"""Pages that leave their pool and come back: the same entries, and no page or byte lost or held twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.tiered.extents import LayerExtents, Transit
from millpond.cache.tiered.offloaded_pages import OffloadedPages, Patches
from millpond.cache.tiered.page_fetch import PageFetch
from millpond.cache.tiered.write_back import MAX_PATCHES, write_back
from millpond.kernels import ops, page_rows
from millpond.kernels.args import EntryRows
from millpond.tiers.buffers import Slot, aligned_buffer
from millpond.tiers.files import ScratchFile
from millpond.tiers.loader import Loader
from millpond.tiers.threads import ThreadBackend

HEADS, DIM, SLOTS = 2, 16, 8


class Bench:
    """A pool, the pages that left it, and a table."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.memory_limit = MemoryLimit(limit)
        self.pool = PagePool(DIM, DIM, torch.float32, slots=SLOTS, memory_limit=self.memory_limit)
        self.loader = Loader(ThreadBackend(2))
        slots = [Slot(aligned_buffer(1 << 16)) for _ in range(4)]
        self.transit = Transit(self.loader, slots[:2], slots[2:])
        self.extents = LayerExtents(ScratchFile(folder), self.transit)
        self.offloaded = OffloadedPages(self.pool, self.extents)

    def table(self, *lens: int) -> PageTable:
        """A table of as many sequences, with random entries."""
        table = PageTable(self.pool, len(lens), HEADS)
        for sequence, n in enumerate(lens):
            table.reserve(sequence, np.full(HEADS, n, dtype=np.int32))
            index = torch.arange(n, dtype=torch.int32).expand(HEADS, -1).contiguous()
            k, v = (torch.randn(HEADS, n, DIM) for _ in range(2))
            positions = torch.arange(n, dtype=torch.int32).expand(HEADS, -1).contiguous()
            start, count = torch.zeros(HEADS, dtype=torch.int32), torch.full((HEADS,), n, dtype=torch.int32)
            ops.write(
                table.regions_of(table.rows(sequence)),
                EntryRows(start, count, index, k, v, positions, torch.rand(HEADS, n)),
            )
            table.set_lengths(sequence, np.full(HEADS, n, dtype=np.int32))
        return table

    def leave(
        self, table: PageTable, fetch: PageFetch | None = None, *, appends: bool = False, rewritten: Any = None
    ) -> None:
        assert write_back(table, self.offloaded, fetch, appends=appends, rewritten=rewritten) == {}

    def come(self, table: PageTable) -> PageFetch:
        fetch = PageFetch.begin(table)
        fetch.end(table)
        return fetch

    def check(self, *tables: PageTable) -> None:
        """Every page is held by those that name it."""
        here = [t.held() for t in tables if not t.is_offloaded]
        self.pool.check_integrity([*here, self.offloaded.residents])
        self.offloaded.check_integrity([t.held() for t in tables if t.is_offloaded])


@pytest.fixture(params=["native", "reference"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    if request.param == "reference":
        monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    elif not page_rows.serves():
        pytest.skip("installed without native kernels")
    torch.manual_seed(0)
    made = Bench(tmp_path)
    yield made
    made.loader.close()
    made.extents.close()


def content(table: PageTable) -> list[torch.Tensor]:
    lens = int(table.lengths().max())
    found = ops.read(table.regions, lens)
    here = torch.arange(lens) < table.lens[:, None]
    return [part[here] for part in (found.keys, found.values, found.positions, found.scores)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("appends", [True, False])
def test_what_comes_back_is_what_left(appends: bool, bench: Bench) -> None:
    table = bench.table(20, 5, 33)
    before = content(table)
    bench.leave(table, appends=appends)
    assert table.is_offloaded
    assert bench.pool.n_live == (3 * HEADS if appends else 0), "the pages that are not full stay"
    bench.check(table)
    for _ in range(2):
        fetch = bench.come(table)
        assert same(content(table), before)
        written = bench.transit.bytes_written
        bench.leave(table, fetch, appends=appends)
        assert bench.transit.bytes_written == written, "nothing has changed"
        bench.check(table)
    table.clear()
    assert (bench.pool.n_live, bench.offloaded.n_live, bench.extents.used) == (0, 0, 0)


def test_sequences_are_chosen_joined_and_shared_while_they_are_away(bench: Bench) -> None:
    one, two = bench.table(20, 9), bench.table(14)
    parts = [content(one), content(two)]
    bench.leave(one)
    bench.leave(two)
    one.join(two)
    one.select([2, 0, 2])
    bench.check(one)
    fetch = bench.come(one)
    n = 20 * HEADS
    expected = [torch.cat([b, a[:n], b]) for a, b in zip(*parts, strict=True)]
    assert same(content(one), expected)
    assert bench.pool.n_live == HEADS * (2 + 3), "what two sequences hold is here once"
    one.copy_on_write(whole=True)
    bench.leave(one, fetch)
    bench.check(one)
    bench.come(one)
    assert same(content(one), expected)


def test_entries_that_are_overwritten_wait_until_there_are_many(bench: Bench) -> None:
    table = bench.table(4 * SLOTS)
    bench.leave(table)
    first = bench.transit.bytes_written
    steps = 2 * MAX_PATCHES
    for step in range(steps):
        fetch = bench.come(table)
        for head in range(HEADS):  # as a kernel does: another entry in the place of a victim
            slot = (7 * step + head) % (4 * SLOTS)
            page = int(table.pages[head, slot // SLOTS])
            arrays = bench.pool.arrays
            arrays.keys[0][page, slot % SLOTS] = step
            arrays.positions[0][page, slot % SLOTS] = 1000 + step
        before = content(table)
        bench.leave(table, fetch)
        bench.check(table)
        fetch = bench.come(table)
        assert same(content(table), before)
        bench.leave(table, fetch)
    assert 0 < bench.transit.bytes_written - first <= first * (steps // MAX_PATCHES)
    table.clear()
    assert (bench.offloaded.patches.nbytes, bench.extents.used) == (0, 0)


def test_a_page_that_was_freed_and_used_again_is_another_one(bench: Bench) -> None:
    """Two heads hold the same positions, so a page that changes hands looks the same by its positions alone."""
    table = bench.table(2 * SLOTS)
    bench.leave(table)
    fetch = bench.come(table)
    keys = ops.read(table.regions, 2 * SLOTS).keys
    swapped = torch.stack([keys[1], keys[0]])
    table.renew(0, np.full(HEADS, 2 * SLOTS, dtype=np.int32))
    index = torch.arange(2 * SLOTS, dtype=torch.int32).expand(HEADS, -1).contiguous()
    start, count = torch.zeros(HEADS, dtype=torch.int32), torch.full((HEADS,), 2 * SLOTS, dtype=torch.int32)
    ops.write(table.regions, EntryRows(start, count, index, swapped, swapped, index, torch.zeros(HEADS, 2 * SLOTS)))
    table.set_lengths(0, np.full(HEADS, 2 * SLOTS, dtype=np.int32))
    bench.leave(table, fetch)
    bench.come(table)
    assert torch.equal(ops.read(table.regions, 2 * SLOTS).keys, swapped)


def test_all_entries_of_a_sequence_have_changed(bench: Bench) -> None:
    table = bench.table(2 * SLOTS, 2 * SLOTS)
    bench.leave(table)
    fetch = bench.come(table)
    pages = torch.from_numpy(table.held()).long()
    bench.pool.arrays.values[0][pages] += 1  # a merge, which no position tells of
    before = content(table)
    bench.leave(table, fetch, rewritten=np.array([True, True]))
    bench.come(table)
    assert same(content(table), before)


def test_a_fetch_that_is_cancelled_changes_nothing(bench: Bench) -> None:
    table = bench.table(20)
    before = content(table)
    bench.leave(table, appends=True)
    PageFetch.begin(table).cancel(bench.pool)
    bench.check(table)
    bench.come(table)
    assert same(content(table), before)


def test_without_room_for_patches_pages_are_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit=64 << 10)
    table = bench.table(2 * SLOTS)
    bench.leave(table)
    fetch = bench.come(table)
    page = int(table.pages[0, 0])
    bench.pool.arrays.positions[0][page, 0] = 77
    bench.memory_limit.limit_bytes = bench.memory_limit.nbytes  # others have taken the rest
    written = bench.transit.bytes_written
    bench.leave(table, fetch)
    assert bench.transit.bytes_written > written
    assert bench.offloaded.patches.nbytes == 0
    bench.loader.close()
    bench.extents.close()


def test_patches_of_one_slot_replace_each_other() -> None:
    patches = Patches()
    pages, slots = np.array([3, 3, 5], dtype=np.int32), np.array([0, 1, 0])
    patches.put(pages, slots, [torch.tensor([[1.0], [2.0], [3.0]])])
    patches.put(np.array([3], dtype=np.int32), np.array([1]), [torch.tensor([[9.0]])])
    assert patches.counts(6).tolist() == [0, 0, 0, 2, 0, 1]
    place = np.full(6, -1)
    place[3] = 0
    found, at, which = patches.of(place)
    (rows,) = patches.rows
    assert dict(zip(at.tolist(), rows[which, 0].tolist(), strict=True)) == {0: 1.0, 1: 9.0}
    assert found.tolist() == [0, 0]
    gone = np.zeros(6, dtype=bool)
    gone[3] = True
    patches.drop(gone)
    assert patches.counts(6).tolist() == [0, 0, 0, 0, 0, 1]


def test_a_slot_that_was_free_holds_a_new_entry_whatever_lay_there(bench: Bench) -> None:
    table = bench.table(SLOTS + 3)
    arrays = bench.pool.arrays
    last = [int(table.pages[head, 1]) for head in range(HEADS)]
    for page in last:
        arrays.positions[0][page, 3] = 500  # of an entry that is long gone
    bench.leave(table)
    fetch = bench.come(table)
    lens = np.full(HEADS, SLOTS + 4, dtype=np.int32)
    for head in range(HEADS):
        page = int(table.pages[head, 1])
        arrays.positions[0][page, 3], arrays.keys[0][page, 3] = 500, float(head + 7)
    table.set_lengths(0, lens)
    before = content(table)
    bench.leave(table, fetch)
    bench.come(table)
    assert same(content(table), before)


def test_pages_that_several_sequences_hold_leave_once(bench: Bench) -> None:
    table = bench.table(20)
    table.select([0, 0, 0])
    before = content(table)
    bench.leave(table)
    assert bench.offloaded.n_live == HEADS * 3
    bench.check(table)
    bench.come(table)
    assert same(content(table), before)


def test_a_table_that_held_nothing_when_it_came(bench: Bench) -> None:
    table, full = bench.table(0), bench.table(20)
    bench.leave(table, appends=True)
    fetch = bench.come(table)
    table.join(full)
    table.select([1])
    before = content(table)
    bench.leave(table, fetch, appends=True)
    bench.check(table)
    bench.come(table)
    assert same(content(table), before)


def test_pages_that_others_hold_are_not_written_again_with_those_of_their_sequence(bench: Bench) -> None:
    """Two tables hold eight pages a head; four change in one, until its sequence is written again: those four alone."""
    table = bench.table(8 * SLOTS)
    bench.leave(table)
    other, pages = table.fork(), HEADS * bench.pool.kv_bytes_per_page
    written = []
    for step in range(3):
        fetch = bench.come(table)
        for page in table.pages[:, :4].flatten().tolist():  # more entries than may wait
            bench.pool.arrays.keys[0][page] = step
            bench.pool.arrays.positions[0][page] = 1000 * (step + 1) + torch.arange(SLOTS, dtype=torch.int32)
        before = bench.transit.bytes_written
        bench.leave(table, fetch)
        written.append(bench.transit.bytes_written - before)
    assert 4 * SLOTS > MAX_PATCHES
    assert written == [4 * pages] * 3
    bench.check(table, other)
    bench.come(other)
    assert int(ops.read(other.regions, 8 * SLOTS).positions.max()) == 8 * SLOTS - 1
    bench.come(table)
    assert float(ops.read(table.regions, SLOTS).keys[0, 0, 0]) == 2
