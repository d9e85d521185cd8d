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

from millpond.cache.tiered.extents import LayerExtents, PageRun, Transit
from millpond.errors import DataError
from millpond.tiers.aligned import ALIGNMENT, aligned_buffer
from millpond.tiers.loader import Errand, Loader
from millpond.tiers.slots import Slot
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


class ExtentsMachine(RuleBasedStateMachine):
    """Writes, reads, frees and reuses runs, of which the tasks end late and in any order, and some fail."""

    def __init__(self) -> None:
        super().__init__()
        self.file, self.backend = MemoryFile(), ManualBackend()
        slots = [Slot(aligned_buffer(SLOT)) for _ in range(4)]
        self.transit = Transit(Loader(self.backend), slots[:2], slots[2:])
        self.extents = LayerExtents(self.file, self.transit)
        self.content: dict[PageRun, int] = {}
        self.damaged: set[PageRun] = set()  # something went wrong while they were written
        self.reads: list[tuple[Errand, list[PageRun], dict[PageRun, bytes], list[int]]] = []
        self.n_written = 0

    def until(self, errand: Errand | None, which: int = 0) -> None:
        """Tasks run until one is over."""
        while errand is not None and not errand.done:
            ready = self.backend.ready()
            self.run_task(ready[which % len(ready)])

    def run_task(self, place: int) -> None:
        """Faults that a write meets are of the runs that are being written."""
        before = self.file.n_faults
        under_way = [run for run in self.content if run.written is not None and not run.written.done]
        reading = [read for read in self.reads if not read[0].done]
        self.backend.run(place)
        if self.file.n_faults > before:
            self.damaged |= {run for run in under_way if run.written is not None and run.written.done}
            for read in reading:
                if read[0].done:
                    read[3].append(1)

    @rule(n=st.integers(1, SLOT), which=st.integers(0, 3))
    def write(self, n: int, which: int) -> None:
        if all(one is not None and not one.done for one in self.transit._writes):
            self.until(self.transit._writes[0], which)
        self.n_written += 1
        value = self.n_written % 251

        def fill(room: Tensor) -> None:
            room.fill_(value)

        self.content[self.extents.write(fill, n, 1)] = value

    @precondition(lambda self: self.content)
    @rule(chosen=st.sets(st.integers(0, 6), min_size=1), which=st.integers(0, 3))
    def read(self, chosen: set[int], which: int) -> None:
        runs = list({list(self.content)[n % len(self.content)]: None for n in sorted(chosen)})
        for run in runs:
            self.until(run.written, which)
        wanted = [run for run in runs if run.lost() is None]
        found: dict[PageRun, bytes] = {}

        def take(run: PageRun, data: Tensor) -> None:
            found[run] = data.numpy().tobytes()

        self.reads += [(errand, part, found, []) for errand, part in self.extents.read(wanted, take)]

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
        self.until(run.written, which)
        self.extents.free(run)
        del self.content[run]
        self.damaged.discard(run)

    @rule(faults=st.lists(st.sampled_from(FAULTS), max_size=4))
    def faults_follow(self, faults: list[str]) -> None:
        self.file.faults += faults

    @invariant()
    def what_is_given_is_what_was_written(self) -> None:
        for _, _, found, _ in self.reads:
            for run, data in found.items():
                if run not in self.content:  # freed since; another part of the same read is under way
                    continue
                assert data == bytes([self.content[run]]) * run.needed

    @invariant()
    def runs_lie_apart(self) -> None:
        places = sorted((run.offset, run.offset + run.nbytes) for run in self.content)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        assert self.extents.used == sum(run.nbytes for run in self.content)

    def teardown(self) -> None:
        self.backend.close()
        assert all(errand.done for errand, _, _, _ in self.reads), "no read is lost"
        assert all(run.written is None or run.written.done for run in self.content), "no write is lost"


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_a_run_holds_what_was_put_into_its_slot() -> None:
    """Two slots, five writes that end in reverse order of what a careless reuse would need."""
    file, backend = MemoryFile(), ManualBackend()
    slots = [Slot(aligned_buffer(SLOT)) for _ in range(4)]
    extents = LayerExtents(file, Transit(Loader(backend), slots[:2], slots[2:]))

    def fill(value: int) -> Callable[[Tensor], None]:
        def put(room: Tensor) -> None:
            room.fill_(value)

        return put

    runs = [extents.write(fill(n), ALIGNMENT, 1) for n in (1, 2)]
    backend.run(1)
    runs.append(extents.write(fill(3), ALIGNMENT, 1))  # takes the slot of the second
    backend.close()
    for value, run in enumerate(runs, 1):
        assert bool((file.data[run.offset : run.offset + ALIGNMENT] == value).all())
