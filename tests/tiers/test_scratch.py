"""Scratch files, the space in them, and what is handed on or written in the background."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millpond.cache.tiered.extents import FreeList
from millpond.errors import DataError
from millpond.tiers import files
from millpond.tiers.buffers import ALIGNMENT, Slot, SlotState, aligned_buffer
from millpond.tiers.devices import DeviceLoader, SimulatedDevice
from millpond.tiers.files import DirectFile, ScratchFile
from millpond.tiers.loader import Extent, Loader
from millpond.tiers.threads import ThreadBackend


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_a_free_list_gives_no_byte_twice(steps: list[tuple[bool, int]]) -> None:
    space, taken = FreeList(), []
    for takes, n in steps:
        if not takes and taken:
            begin, nbytes = taken.pop(n % len(taken))
            space.give_back(begin, nbytes)
            continue
        begin = space.take(n)
        if begin is None:
            space.grow(space.lacking(n))
            begin = space.take(n)
        assert begin is not None
        taken.append((begin, n))
        used = sorted(taken)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(used)), "two hold one byte"
        assert used[-1][0] + used[-1][1] <= space.size
        assert space.used == sum(nbytes for _, nbytes in taken)
        assert all(begin < end for begin, end in space._gaps), "a gap without a byte"
    for begin, nbytes in taken:
        space.give_back(begin, nbytes)
    assert space.used == 0
    assert space.take(space.size) == (0 if space.size else None)


@pytest.mark.parametrize("nameless", [True, False])
def test_a_scratch_file_has_no_name(nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nameless:
        monkeypatch.setattr(files.os, "O_TMPFILE", 0)
    file = ScratchFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    file.grow(4 * ALIGNMENT)
    data, room = (Slot(aligned_buffer(2 * ALIGNMENT)) for _ in range(2))
    data.data[:] = torch.arange(2 * ALIGNMENT).to(torch.uint8)
    assert file.write_from(ALIGNMENT, data.view) == 2 * ALIGNMENT
    assert file.read_into(ALIGNMENT, room.view) == 2 * ALIGNMENT
    assert torch.equal(room.data, data.data)
    assert file.size == 4 * ALIGNMENT
    file.close()


def test_a_file_system_that_refuses_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some open a file for it and refuse the reads and writes."""
    file = ScratchFile(tmp_path)
    if not file.direct:
        pytest.skip("the file system has no direct reads")
    file.grow(ALIGNMENT)
    slot = Slot(aligned_buffer(ALIGNMENT))
    slot.data[:] = 3
    real = files.os.pwritev
    tries = []

    def refused(fd: int, data: list[memoryview], offset: int) -> int:
        tries.append(offset)
        if len(tries) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(files.os, "pwritev", refused)
    assert file.write_from(0, slot.view) == ALIGNMENT
    assert (len(tries), file.direct) == (2, False)
    assert file.read_into(0, slot.view) == ALIGNMENT
    file.close()


def test_what_is_read_through_one_slot_comes_in_order(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"".join(bytes([n]) * ALIGNMENT for n in range(20)))
    file, loader, slot = DirectFile(path), Loader(ThreadBackend(3)), Slot(aligned_buffer(ALIGNMENT))
    found: list[int] = []
    errands = [
        loader.hand_on(
            Extent(file, n * ALIGNMENT, ALIGNMENT, 10, 0), slot, lambda data: found.append(int(data.sum()) // 10)
        )
        for n in range(20)
    ]
    assert [errand.finish() for errand in errands] == [None] * 20
    assert found == list(range(20))
    late = loader.hand_on(Extent(file, 20 * ALIGNMENT, ALIGNMENT, 10, 0), slot, lambda data: None)
    assert "10 of them needed, 0 read" in str(late.finish())
    loader.close()
    file.close()


def test_what_a_taker_raises_is_the_error_of_the_errand(tmp_path: Path) -> None:
    file, loader, slot = ScratchFile(tmp_path), Loader(ThreadBackend()), Slot(aligned_buffer(ALIGNMENT))
    file.grow(ALIGNMENT)

    def take(data: torch.Tensor) -> None:
        raise KeyError("x")

    error = loader.hand_on(Extent(file, 0, ALIGNMENT, 1, 0), slot, take).finish()
    assert isinstance(error, DataError)
    assert isinstance(error.__cause__, KeyError)
    loader.close()
    file.close()


def test_slots_of_a_device_are_filled_from_a_file_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "data"
    whole = torch.randint(0, 256, (11 * ALIGNMENT,), dtype=torch.uint8)
    path.write_bytes(whole.numpy().tobytes())
    file, loader, device = DirectFile(path), Loader(ThreadBackend(2)), SimulatedDevice()
    through = [Slot(aligned_buffer(2 * ALIGNMENT)) for _ in range(2)]
    slot = Slot(aligned_buffer(12 * ALIGNMENT))
    filler = DeviceLoader(loader, device, through)
    extents = [
        Extent(file, 0, 5 * ALIGNMENT, 5 * ALIGNMENT, 0),
        Extent(file, 6 * ALIGNMENT, 5 * ALIGNMENT, 99, 5 * ALIGNMENT),
    ]
    arrival = filler.read(extents, slot)
    assert slot.state is SlotState.LOADING
    assert arrival.wait().state is SlotState.IN_USE
    assert torch.equal(slot.data[: 5 * ALIGNMENT], whole[: 5 * ALIGNMENT])
    begin = 5 * ALIGNMENT
    assert torch.equal(slot.data[begin : begin + 99], whole[6 * ALIGNMENT : 6 * ALIGNMENT + 99])
    slot.release()
    source = aligned_buffer(ALIGNMENT)
    filler.copy(source, slot).cancel()
    assert slot.state is SlotState.FREE
    loader.close()
    device.close()
    file.close()
