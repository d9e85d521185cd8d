"""Loader and slots: no slot is read while it is written, no ticket is lost, whatever the order of what happens."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.errors import BudgetError, DataError
from millpond.tiers.buffers import ALIGNMENT, Slot, SlotState, aligned_buffer
from millpond.tiers.files import DirectFile
from millpond.tiers.ledger import Ledger, Tier
from millpond.tiers.loader import Extent, Loader, Ticket
from millpond.tiers.threads import ThreadBackend
from tests.helpers.examples import examples


class NumberedFile:
    """Every 4 KiB hold the number of their place; some reads fail."""

    path, size = Path("numbers.bin"), 64 * ALIGNMENT

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.writes: Callable[[memoryview], None] = lambda room: None

    def read_into(self, offset: int, room: memoryview) -> int:
        if offset in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.writes(room)
        np.frombuffer(room, dtype=np.int32)[:] = offset // ALIGNMENT
        return len(room)


class ManualBackend:
    """Tasks run when a test says so: the first of any slot."""

    def __init__(self) -> None:
        self.tasks: list[tuple[int, Callable[[], None]]] = []

    def submit(self, slot: int, task: Callable[[], None]) -> None:
        self.tasks.append((slot, task))

    def ready(self) -> list[int]:
        """Places of the tasks that may run."""
        slots = [slot for slot, _ in self.tasks]
        return [n for n, slot in enumerate(slots) if slot not in slots[:n]]

    def run(self, place: int) -> None:
        self.tasks.pop(place)[1]()

    def close(self) -> None:
        while self.tasks:
            self.run(0)


class LoaderMachine(RuleBasedStateMachine):
    """Submits, finishes late, fails, cancels and reuses slots."""

    def __init__(self) -> None:
        super().__init__()
        self.file, self.backend = NumberedFile(), ManualBackend()
        self.file.writes = self.check_write
        self.loader = Loader(self.backend)
        self.slots = [Slot(aligned_buffer(ALIGNMENT)) for _ in range(3)]
        self.tickets: list[tuple[Ticket, int, bool]] = []
        self.reading: list[tuple[Slot, int]] = []

    def check_write(self, room: memoryview) -> None:
        address = np.frombuffer(room, dtype=np.uint8).ctypes.data
        for slot, _ in self.reading:
            assert slot.data.data_ptr() != address, "a slot is written while it is read"

    @precondition(lambda self: any(slot.state is SlotState.FREE for slot in self.slots))
    @rule(place=st.integers(0, 63), fails=st.booleans(), which=st.integers(0, 2))
    def submit(self, place: int, fails: bool, which: int) -> None:
        free = [slot for slot in self.slots if slot.state is SlotState.FREE]
        if fails:
            self.file.failing.add(place * ALIGNMENT)
        extent = Extent(self.file, place * ALIGNMENT, ALIGNMENT, ALIGNMENT, 0)
        ticket = self.loader.read([extent], free[which % len(free)])
        self.tickets.append((ticket, place, place * ALIGNMENT in self.file.failing))

    @precondition(lambda self: self.backend.tasks)
    @rule(which=st.integers(0, 5))
    def finish_one(self, which: int) -> None:
        ready = self.backend.ready()
        self.backend.run(ready[which % len(ready)])

    @precondition(lambda self: any(ticket.done for ticket, _, _ in self.tickets))
    @rule(which=st.integers(0, 5))
    def wait(self, which: int) -> None:
        done = [entry for entry in self.tickets if entry[0].done]
        entry = done[which % len(done)]
        self.tickets.remove(entry)
        ticket, place, fails = entry
        if place * ALIGNMENT in self.file.failing and not fails:
            fails = self.failed(ticket)
        if fails:
            with pytest.raises(DataError, match=rf"offset {place * ALIGNMENT:,}: {ALIGNMENT:,} bytes wanted"):
                ticket.wait()
            assert ticket.slot.state is SlotState.FREE
        else:
            self.reading.append((ticket.wait(), place))

    @staticmethod
    def failed(ticket: Ticket) -> bool:
        return ticket._error is not None

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        ticket, _, _ = self.tickets.pop(which % len(self.tickets))
        ticket.cancel()
        assert ticket.slot.state is SlotState.FREE

    @precondition(lambda self: self.reading)
    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        slot, _ = self.reading.pop(which % len(self.reading))
        slot.release()

    @precondition(lambda self: self.reading)
    @rule(which=st.integers(0, 5))
    def a_slot_in_use_is_not_loaded(self, which: int) -> None:
        slot, _ = self.reading[which % len(self.reading)]
        with pytest.raises(AssertionError):
            self.loader.read([], slot)

    @invariant()
    def what_is_read_is_what_was_asked_for(self) -> None:
        for slot, place in self.reading:
            assert bool((slot.data.view(dtype=slot.data.dtype).numpy().view(np.int32) == place).all())

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        loading = [ticket.slot for ticket, _, _ in self.tickets]
        in_use = [slot for slot, _ in self.reading]
        owned = [id(slot) for slot in [*loading, *in_use]]
        assert len(owned) == len(set(owned))
        for slot in self.slots:
            state = SlotState.LOADING if slot in loading else SlotState.IN_USE if slot in in_use else SlotState.FREE
            assert slot.state is state

    def teardown(self) -> None:
        self.loader.close()
        assert all(ticket.done for ticket, _, _ in self.tickets), "no ticket is lost"


TestLoader = LoaderMachine.TestCase
TestLoader.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_a_file_is_read_in_extents(tmp_path: Path) -> None:
    path = tmp_path / "data"
    whole = np.random.default_rng(0).integers(0, 256, 10_000_000, dtype=np.uint8)
    path.write_bytes(whole.tobytes())
    file, backend = DirectFile(path), ThreadBackend(2)
    loader, slots = Loader(backend), [Slot(aligned_buffer(9 << 20)) for _ in range(3)]
    places = [(0, 8 << 20), (4096, 4096), (8 << 20, (2 << 20))]
    tickets = [
        loader.read([Extent(file, offset, nbytes, min(nbytes, file.size - offset), 0)], slot)
        for (offset, nbytes), slot in zip(places, slots, strict=True)
    ]
    for (offset, nbytes), ticket in zip(places, tickets, strict=True):
        expected = whole[offset : offset + nbytes]
        assert bool((ticket.wait().data.numpy()[: len(expected)] == expected).all())
    loader.close()
    file.close()


def test_a_file_that_is_shorter_than_it_was(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(10_000))
    file, loader = DirectFile(path), Loader(ThreadBackend())
    ticket = loader.read([Extent(file, 8192, 8192, 6000, 0)], Slot(aligned_buffer(8192)))
    with pytest.raises(DataError, match=r"8,192 bytes wanted, 6,000 of them needed, 1,808 read in each of 2 tries"):
        ticket.wait()
    loader.close()
    file.close()


def test_a_ledger_refuses_what_a_tier_lacks() -> None:
    ledger = Ledger([Tier("host", "host", 100), Tier("disk", "disk")])
    kept = ledger.take("host", "weights", 60)
    with pytest.raises(BudgetError, match=r"slots takes 50 bytes of the tier 'host', which has 40 free of 100"):
        ledger.take("host", "slots", 50)
    assert ledger.used("host") == 60
    kept.release()
    kept.release()
    ledger.take("host", "slots", 50)
    assert (ledger.used("host"), ledger.peak("host"), ledger.free("disk")) == (50, 60, None)


def test_what_no_one_foresaw_fails_its_ticket_and_no_thread(tmp_path: Path) -> None:
    """A file that raises what no file should: the ticket says so, and the backend reads on."""
    file = NumberedFile()

    def raises(room: memoryview) -> None:
        file.writes = lambda room: None
        raise ZeroDivisionError("a defect")

    file.writes = raises
    loader = Loader(ThreadBackend(1))
    slots = [Slot(aligned_buffer(ALIGNMENT)) for _ in range(2)]
    first, second = (loader.read([Extent(file, 0, ALIGNMENT, ALIGNMENT, 0)], slot) for slot in slots)
    with pytest.raises(DataError, match="ZeroDivisionError: a defect"):
        first.wait()
    assert first.slot.state is SlotState.FREE
    assert second.wait() is slots[1]
    loader.close()


@pytest.mark.parametrize(("times", "fails"), [(1, False), (2, True)])
def test_bytes_that_were_read_wrong_once_are_read_again(times: int, fails: bool) -> None:
    class Flipping(NumberedFile):
        left = times

        def read_into(self, offset: int, room: memoryview) -> int:
            n = super().read_into(offset, room)
            if self.left:
                self.left -= 1
                room[5] ^= 1
            return n

    loader = Loader(ThreadBackend(1))
    whole = np.full(ALIGNMENT // 4, 3, dtype=np.int32).tobytes()
    extent = Extent(Flipping(), 3 * ALIGNMENT, ALIGNMENT, ALIGNMENT, 0, zlib.crc32(whole))
    ticket = loader.read([extent], Slot(aligned_buffer(ALIGNMENT)))
    if fails:
        with pytest.raises(DataError, match="offset 12,288: 4,096 bytes have the checksum"):
            ticket.wait()
    else:
        assert bytes(ticket.wait().view) == whole
    loader.close()
