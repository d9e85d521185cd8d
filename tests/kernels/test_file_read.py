"""Reads in small requests give the bytes of one long read, up to the end of the file, and the system's errors."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from millpond.kernels.native import library
from millpond.tiers import files
from millpond.tiers.files import read_file

REQUEST = 4096


@pytest.fixture(params=["native", "python"])
def requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "REQUEST_BYTES", REQUEST)
    if request.param == "python":
        monkeypatch.setattr(library, "load", lambda: None)
    elif library.load() is None:
        pytest.skip("the native kernels are not built")


@pytest.mark.usefixtures("requests")
@pytest.mark.parametrize("length", [0, 1, REQUEST, 3 * REQUEST, 3 * REQUEST + 5, 9 * REQUEST])
@pytest.mark.parametrize("offset", [0, REQUEST, 2 * REQUEST - 3])
def test_all_bytes_until_the_end_of_the_file(tmp_path: Path, length: int, offset: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 6 * REQUEST + 7, dtype=np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    room = memoryview(bytearray(b"\xaa" * (length + 2)))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        n = read_file(fd, room[1 : 1 + length], offset)
    finally:
        os.close(fd)
    there = content[offset : offset + length]
    assert n == len(there)
    assert room[1 : 1 + n] == there
    assert room[0] == 0xAA, "nothing before the place"
    assert set(room[1 + n :]) == {0xAA}, "nor behind what there was"


@pytest.mark.usefixtures("requests")
def test_an_error_is_the_systems(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError) as caught:
            read_file(fd, memoryview(mmap.mmap(-1, 3 * REQUEST)), 0)
    finally:
        os.close(fd)
    assert caught.value.errno == errno.EBADF


def test_a_library_that_has_no_such_call_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> int:
        return -errno.ENOSYS

    monkeypatch.setattr(library, "load", lambda: ("none", SimpleNamespace(mp_read_file=read)))
    monkeypatch.setattr(files, "REQUEST_BYTES", 2)
    (tmp_path / "file").write_bytes(b"abcdef")
    room = memoryview(bytearray(6))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    assert read_file(fd, room, 0) == 6
    os.close(fd)
    assert bytes(room) == b"abcdef"
