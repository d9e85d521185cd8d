"""Mapped: what moved out of a mapped file leaves memory, and whoever still reads it finds what was there."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millpond.models.lean import describe
from millpond.models.lean.describe import Mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages were written to")
NUMBERS = 2**22  #: 16 MiB of float32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(torch.arange(NUMBERS, dtype=torch.float32).numpy().tobytes())
    return path


def opened(file: Path) -> Tensor:
    return torch.from_file(str(file), shared=False, size=NUMBERS)


def resident() -> int:
    """Bytes of mapped files in this process's memory."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssFile:"))
    return int(line.split()[1]) * 1024


def test_what_moved_leaves_memory_and_can_still_be_read(file: Path) -> None:
    old = opened(file)
    stays, weight = torch.nn.Parameter(old[: NUMBERS // 2]), torch.nn.Parameter(old[NUMBERS // 2 :])
    assert old.sum() > 0
    before = resident()
    with Mapped([stays, weight]).moving([stays, weight]):
        weight.data = weight.data.clone()
    assert before - resident() > 7 * 2**20
    assert torch.equal(old, torch.arange(NUMBERS, dtype=torch.float32))
    assert torch.equal(weight, old[NUMBERS // 2 :])


def test_what_was_written_to_stays(file: Path) -> None:
    old = opened(file)
    old[17] = -1.0
    weight = torch.nn.Parameter(old)
    with Mapped([weight]).moving([weight]):
        weight.data = weight.data.clone()
    assert old[17] == -1.0


def test_what_is_copied_leaves_memory_before_the_rest_is_read(file: Path) -> None:
    """A matrix that is larger than all others is never in memory twice."""
    old = opened(file).view(-1, 256)
    assert old.sum() > 0
    before, found = resident(), []

    class Noted(describe.Mapped):
        def _let_go(self, begin: int, end: int) -> None:
            super()._let_go(begin, end)
            found.append(before - resident())

    assert torch.equal(Noted([old]).copy(old, torch.empty_like(old)), old)
    assert len(found) == 2**24 // describe._STRIDE
    assert found[0] > describe._STRIDE * 3 // 4


def test_advice_on_parts_of_a_file_hides_none_of_it(file: Path) -> None:
    """It splits the mapping, and a weight may begin in one part and end in the next."""
    old = opened(file)
    assert old.sum() > 0
    page, begin = mmap.PAGESIZE, old.data_ptr()
    advised = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin + 64 * page), ctypes.c_size_t(64 * page), 14)
    assert advised == 0
    before, weight = resident(), torch.nn.Parameter(old)
    with Mapped([weight]).moving([weight]):
        weight.data = weight.data.clone()
    assert before - resident() > 13 * 2**20


def test_memory_that_is_no_file_stays() -> None:
    old = torch.ones(NUMBERS)
    weight = torch.nn.Parameter(old)
    with Mapped([weight]).moving([weight]):
        weight.data = weight.data.clone()
    assert bool((old == 1).all())


def test_pages_are_counted_only_where_a_weight_lies_in_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(describe, "_untouched", lambda: counted.append(1) or [])
    Mapped([torch.ones(5), torch.ones(NUMBERS)])
    assert not counted
    old = opened(file)
    Mapped([torch.ones(5), old[NUMBERS // 2 :]])
    assert counted
