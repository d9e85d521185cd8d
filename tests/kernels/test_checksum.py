"""The native CRC-32 is zlib's, whatever the length, the place and what comes before."""

from __future__ import annotations

import zlib

import pytest
import torch

from millpond.kernels import checksum
from millpond.kernels.checksum import crc32
from millpond.kernels.native import library


@pytest.mark.parametrize("few", [0, checksum._FEW])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 63, 64, 65, 79, 127, 128, 129, 4095, 4097, 65_536, 100_003])
def test_it_is_that_of_zlib(n: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_FEW", few)
    data = torch.randint(0, 256, (n + 7,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    for begin in (0, 1, 7):
        part = data[begin : begin + n]
        for before in (0, 1, 0x80000000, 0xFFFFFFFF, 7 << 40):
            assert crc32(part, before) == zlib.crc32(part.numpy().data, before & 0xFFFFFFFF)


def test_parts_one_after_another_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_FEW", 0)
    data = torch.arange(50_000, dtype=torch.int32).view(torch.uint8)
    for cut in (3, 64, 4096, 77_777):
        assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data.numpy().data)


def test_a_flipped_bit_is_seen() -> None:
    data = torch.zeros(100_000, dtype=torch.uint8)
    before = crc32(data)
    for place in (0, 63, 64, 50_000, 99_999):
        data[place] ^= 4
        assert crc32(data) != before
        data[place] ^= 4


def test_without_a_library_it_is_zlib_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    data = torch.arange(10_000, dtype=torch.int32).view(torch.uint8)
    assert crc32(data, 5) == zlib.crc32(data.numpy().data, 5)
