"""Extents, slots and the loader below them: what is read is what was written, or an error, in whatever order."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from millpond.cache.tiered.extents import LayerExtents, Transit
from millpond.errors import DataError
from millpond.kernels.args import RunsInBuffer
from millpond.kernels.checksum import crc32
from millpond.tiers.buffers import ALIGNMENT, Slot, aligned_buffer
from millpond.tiers.loader import Errand, Loader
from tests.helpers.examples import examples
from tests.tiers.test_loader import ManualBackend

#: Bytes of a slot: three blocks of 4 KiB.
SLOT = 3 * ALIGNMENT
#: What the next read or write of the file does; "" is what it should do.
FAULTS = ("", "", "error", "short", "flipped", "lost")


class MemoryFile:
    """A file in memory. Each read and write takes the next of `faults`, as long as there are some."""

    path, size = Path("kv.bin"), 0

    def __init__(self) -> None:
        self.data = np.zeros(0, dtype=np.uint8)
        self.faults: list[str] = []
        self.n_faults = 0

    def grow(self, nbytes: int) -> None:
        self.data = np.concatenate([self.data, np.zeros(nbytes, dtype=np.uint8)])
        self.size += nbytes

    def read_into(self, offset: int, room: memoryview) -> int:
        fault, target = self.next_fault(), np.frombuffer(room, dtype=np.uint8)
        if fault == "error":
            raise OSError(errno.EIO, "Input/output error")
        n = len(target) // 2 if fault == "short" else len(target)
        target[:n] = self.data[offset : offset + n]
        if fault == "flipped":
            target[n // 3] ^= 4
        return n

    def write_from(self, offset: int, data: memoryview) -> int:
        fault, source = self.next_fault(), np.frombuffer(data, dtype=np.uint8)
        if fault == "error":
            raise OSError(errno.ENOSPC, "No space left on device")
        n = len(source) // 2 if fault == "short" else len(source)
        if fault != "lost":  # a disk that says it has written, and has what was there before
            self.data[offset : offset + n] = source[:n]
        if fault == "flipped":
            self.data[offset] ^= 1
        return n

    def close(self) -> None:
        pass

    def next_fault(self) -> str:
        fault = self.faults.pop(0) if self.faults else ""
        self.n_faults += bool(fault)
        return fault


def filled(value: int, n: int) -> Callable[[Tensor, int], int]:
    """What fills n bytes of a run with a value."""

    def fill(room: Tensor, generation: int) -> int:
        room.fill_(value)
        return crc32(room[:n], generation)

    return fill


class ExtentsMachine(RuleBasedStateMachine):
    """Writes, reads, frees and reuses runs, of which the tasks end late and in any order, and some fail."""

    def __init__(self) -> None:
        super().__init__()
        self.file, self.backend = MemoryFile(), ManualBackend()
        slots = [Slot(aligned_buffer(SLOT)) for _ in range(4)]
        self.transit = Transit(Loader(self.backend), slots[:2], slots[2:])
        self.extents = LayerExtents(self.file, self.transit)
        self.content: dict[int, int] = {}
        self.damaged: set[int] = set()  # something went wrong while they were written
        # what is waited for, its runs, what was found and should have been, and the faults meanwhile
        self.reads: list[tuple[Errand, list[int], dict[int, tuple[bytes, bytes]], list[int]]] = []
        self.n_written = 0

    def until(self, errand: Errand | None, which: int = 0) -> None:
        """Tasks run until one is over."""
        while errand is not None and not errand.done:
            ready = self.backend.ready()
            self.run_task(ready[which % len(ready)])

    def is_written(self, run: int) -> bool:
        write = self.extents._writes.get(run)
        return write is None or write.done

    def run_task(self, place: int) -> None:
        """Faults that a write meets are of the runs that are being written."""
        before = self.file.n_faults
        under_way = [run for run in self.content if not self.is_written(run)]
        reading = [read for read in self.reads if not read[0].done]
        self.backend.run(place)
        if self.file.n_faults > before:
            self.damaged |= {run for run in under_way if self.is_written(run)}
            for read in reading:
                if read[0].done:
                    read[3].append(1)

    @rule(n=st.integers(1, SLOT), which=st.integers(0, 3))
    def write(self, n: int, which: int) -> None:
        if all(one is not None and not one.done for one in self.transit._writes):
            self.until(self.transit._writes[0], which)
        self.n_written += 1
        value = self.n_written % 251

        self.content[self.extents.write(filled(value, n), n, 1)] = value

    @precondition(lambda self: self.content)
    @rule(chosen=st.sets(st.integers(0, 6), min_size=1), which=st.integers(0, 3))
    def read(self, chosen: set[int], which: int) -> None:
        runs = np.array(list({list(self.content)[n % len(self.content)]: None for n in sorted(chosen)}))
        for run in runs.tolist():
            self.until(self.extents._writes.get(run), which)
        lost = self.extents.lost(runs)
        runs = np.array([run for run in runs.tolist() if run not in lost], dtype=np.int64)
        wanted = runs[self.extents.in_order(runs)]
        if not len(wanted):
            return
        expected = {n: bytes([self.content[n]]) * int(self.extents.runs.needed[n]) for n in wanted.tolist()}
        found: dict[int, tuple[bytes, bytes]] = {}

        def take(part: slice, data: Tensor, read: RunsInBuffer) -> int:
            for n, run in enumerate(wanted[part].tolist()):
                own = data[read.places[n] : read.places[n] + len(expected[run])]
                if crc32(own, int(read.generations[n])) != read.checksums[n]:
                    return n
                found[run] = own.numpy().tobytes(), expected[run]
            return len(read.places)

        reads = self.extents.read(wanted, take)
        self.reads += [(errand, wanted[part].tolist(), found, []) for errand, part in reads]

    @precondition(lambda self: self.backend.tasks)
    @rule(which=st.integers(0, 5))
    def finish_one(self, which: int) -> None:
        ready = self.backend.ready()
        self.run_task(ready[which % len(ready)])

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 5))
    def wait(self, which: int) -> None:
        read = self.reads[which % len(self.reads)]
        self.until(read[0], which)
        self.reads.remove(read)
        errand, runs, found, faults = read
        error = errand.finish()
        if error is None:
            assert set(runs) <= set(found)
        else:
            assert isinstance(error, DataError)
            assert "kv.bin at offset" in str(error)
            assert faults or self.damaged & set(runs), f"nothing was wrong: {error}"

    @precondition(lambda self: self.content)
    @rule(which=st.integers(0, 6))
    def free(self, which: int) -> None:
        run = list(self.content)[which % len(self.content)]
        if any(run in runs for _, runs, _, _ in self.reads):  # its reader waits first
            return
        self.until(self.extents._writes.get(run), which)
        self.extents.free(run)
        del self.content[run]
        self.damaged.discard(run)

    @rule(faults=st.lists(st.sampled_from(FAULTS), max_size=4))
    def faults_follow(self, faults: list[str]) -> None:
        self.file.faults += faults

    @invariant()
    def what_is_given_is_what_was_written(self) -> None:
        for _, _, found, _ in self.reads:
            assert all(data == expected for data, expected in found.values())

    @invariant()
    def runs_lie_apart(self) -> None:
        runs = self.extents.runs
        assert set(runs.numbers.tolist()) == set(self.content)
        places = sorted((int(runs.offset[n]), int(runs.offset[n] + runs.nbytes[n])) for n in self.content)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        assert self.extents.used == sum(end - begin for begin, end in places)

    def teardown(self) -> None:
        self.backend.close()
        assert all(errand.done for errand, _, _, _ in self.reads), "no read is lost"
        assert all(self.is_written(run) for run in self.content), "no write is lost"


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_a_run_holds_what_was_put_into_its_slot() -> None:
    """Two slots, five writes that end in reverse order of what a careless reuse would need."""
    file, backend = MemoryFile(), ManualBackend()
    slots = [Slot(aligned_buffer(SLOT)) for _ in range(4)]
    extents = LayerExtents(file, Transit(Loader(backend), slots[:2], slots[2:]))

    runs = [extents.write(filled(n, ALIGNMENT), ALIGNMENT, 1) for n in (1, 2)]
    backend.run(1)
    runs.append(extents.write(filled(3, ALIGNMENT), ALIGNMENT, 1))  # takes the slot of the second
    backend.close()
    for value, run in enumerate(runs, 1):
        begin = int(extents.runs.offset[run])
        assert bool((file.data[begin : begin + ALIGNMENT] == value).all())


def test_each_run_has_a_generation_of_its_own() -> None:
    """Of two runs that lie at one place with the same bytes, the checksum of one is not that of the other."""
    file, backend = MemoryFile(), ManualBackend()
    slots = [Slot(aligned_buffer(SLOT)) for _ in range(4)]
    extents = LayerExtents(file, Transit(Loader(backend), slots[:2], slots[2:]))
    given: list[int] = []
    checksums: list[int] = []

    def fill(room: Tensor, generation: int) -> int:
        given.append(generation)
        return filled(7, ALIGNMENT)(room, generation)

    for _ in range(4):
        run = extents.write(fill, ALIGNMENT, 1)
        while backend.tasks:
            backend.run(0)
        assert int(extents.runs.offset[run]) == 0
        checksums.append(int(extents.runs.checksum[run]))
        assert int(extents.runs.columns[4, run]) == given[-1], "what a reader compares with"
        extents.free(run)
    assert len(set(given)) == len(set(checksums)) == 4
    backend.close()
