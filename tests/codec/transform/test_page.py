"""Pages of codes: their bytes, and what is found if a bit of them flips."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from millpond.codec.transform.crc32c import crc32c
from millpond.codec.transform.page import HEADER, PageAddress, pack_pages, page_bytes, unpack_pages
from millpond.errors import DataError

BITS = torch.tensor([7, 3, 1, 0, 2, 1, 0], dtype=torch.uint8)
ADDRESS = PageAddress(0xA1B2C3D4, 5, 2)


def codes(pages: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 128, (32 * pages, len(BITS)), generator=generator)
    return (numbers % (1 << BITS.long())).to(torch.uint8)


def test_a_page_has_fixed_bytes_and_gives_back_its_codes() -> None:
    pages = pack_pages(codes(), BITS, ADDRESS)
    assert pages.shape == (3, page_bytes(BITS)) == (3, 16 + 4 * 14)
    assert torch.equal(unpack_pages(pages, BITS, ADDRESS), codes())


def test_golden_bytes() -> None:
    """Files of other builds and of later versions have these bytes."""
    page = pack_pages(codes(1), BITS, ADDRESS)[0].numpy().tobytes()
    assert page[:12].hex() == "d4c3b2a1" + "0500" + "2000" + "02000000"
    planes = np.frombuffer(page, "<u4", offset=HEADER)
    first = codes(1)[:, 0].tolist()
    assert int(planes[0]) == sum((code & 1) << token for token, code in enumerate(first))
    assert int(planes[6]) == sum((code >> 6 & 1) << token for token, code in enumerate(first))
    assert hashlib.sha256(page).hexdigest() == "8be7cc8243024eeb94566f17b60de4ccf4b89b33ba193d08f744f6c10727811a"


def test_checksums_are_those_of_the_standard() -> None:
    """RFC 3720, B.4."""
    rows = np.stack([np.zeros(32, np.uint8), np.full(32, 255, np.uint8), np.arange(32, dtype=np.uint8)])
    assert [hex(int(crc)) for crc in crc32c(rows)] == ["0x8a9136aa", "0x62a8ab43", "0x46dd794e"]


@pytest.mark.parametrize("byte", [0, 4, 6, 9, 12, 15, 16, 40, 71])
def test_one_flipped_bit_is_found(byte: int) -> None:
    pages = pack_pages(codes(), BITS, ADDRESS)
    pages[1, byte] ^= 16
    with pytest.raises(DataError, match="layer 5: page 3 is damaged"):
        unpack_pages(pages, BITS, ADDRESS)


def test_pages_of_elsewhere() -> None:
    pages = pack_pages(codes(), BITS, ADDRESS)
    for other in (ADDRESS._replace(unit=1), ADDRESS._replace(layer=6), ADDRESS._replace(first=3)):
        with pytest.raises(DataError, match="another text or place"):
            unpack_pages(pages, BITS, other)
    with pytest.raises(DataError, match="another text or place"):
        unpack_pages(pages.flip(0), BITS, ADDRESS)
    with pytest.raises(DataError, match="have 76 bytes each"):
        unpack_pages(pages, BITS + torch.tensor([0, 0, 0, 1, 0, 0, 0], dtype=torch.uint8), ADDRESS)
