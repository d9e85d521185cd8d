"""Page of codes: 32 tokens of one layer in a fixed number of bytes, a header of 16 and then planes of bits.

| bytes | what |
|---|---|
| 0 to 3 | unit: a number of the text or tree that the page belongs to |
| 4, 5 | layer |
| 6, 7 | count: tokens in the page, 1 to 32 |
| 8 to 11 | page: its number in the text, from 0 |
| 12 to 15 | CRC-32C of bytes 0 to 11 and of all behind 15 |
| from 16 | planes of 4 bytes: bit t of plane j of a dimension is bit j of the code of token t |

All numbers are little-endian. Dimensions stand in the order of the transform's rows, keys before values; one with b
bits has b planes, its lowest bit first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.codec.transform.crc32c import crc32c
from millpond.errors import DataError
from millpond.kernels import transform_args
from millpond.kernels.backends import native_for
from millpond.kernels.native import transform as native

#: Tokens of a page.
TOKENS = transform_args.TOKENS
#: Bytes before the planes.
HEADER = transform_args.HEADER_BYTES
#: Pages that are packed or unpacked at a time.
_TOGETHER = 128

_HEADER_TYPE = np.dtype([("unit", "<u4"), ("layer", "<u2"), ("count", "<u2"), ("page", "<u4"), ("crc", "<u4")])


class PageAddress(NamedTuple):
    """Text and layer of pages, and the number of the first."""

    unit: int
    layer: int
    first: int = 0


def page_bytes(bits: Tensor) -> int:
    """Return the bytes of a page whose dimensions, of both sides, have `bits` (rows,)."""
    return HEADER + 4 * int(bits.sum())


def pack_pages(codes: Tensor, bits: Tensor, address: PageAddress) -> Tensor:
    """Return pages as bytes.

    Args:
        codes: (32 P, rows) uint8, each below 2^bits.
        bits: (rows,) uint8.
        address: Where the pages belong.

    Returns:
        (P, bytes) uint8 on the CPU.
    """
    n_pages = len(codes) // TOKENS
    pages = np.zeros((n_pages, page_bytes(bits)), dtype=np.uint8)
    dimension, plane = _planes(bits)
    for begin in range(0, n_pages, _TOGETHER):
        tokens = codes.view(n_pages, TOKENS, -1)[begin : begin + _TOGETHER]
        set_bits = (tokens[:, :, dimension] >> plane) & 1
        bytes_of = set_bits.view(len(tokens), 4, 8, -1) * _weights(codes.device)
        packed = bytes_of.sum(2, dtype=torch.uint8).transpose(1, 2)  # (P, planes, 4)
        pages[begin : begin + len(tokens), HEADER:] = packed.reshape(len(tokens), -1).cpu().numpy()
    return _sealed(pages, address)


def seal_pages(planes: Tensor, address: PageAddress) -> Tensor:
    """Return pages as bytes, see `pack_pages`.

    planes: (P, planes) int32 on any device, bit t that of token t.
    """
    content = planes.cpu().contiguous().view(torch.uint8).numpy()
    return _sealed(np.concatenate([np.zeros((len(content), HEADER), dtype=np.uint8), content], 1), address)


def _sealed(pages: npt.NDArray[np.uint8], address: PageAddress) -> Tensor:
    """Write the headers of pages (P, bytes), and return them."""
    n_pages = len(pages)
    header = pages[:, :HEADER].copy().view(_HEADER_TYPE)[:, 0]
    header["unit"], header["layer"], header["count"] = address.unit, address.layer, TOKENS
    header["page"] = np.arange(address.first, address.first + n_pages)
    pages[:, :HEADER] = header[:, None].view(np.uint8)
    header["crc"] = _checksums(pages)
    pages[:, :HEADER] = header[:, None].view(np.uint8)
    return torch.from_numpy(pages)


def unpack_pages(pages: Tensor, bits: Tensor, address: PageAddress) -> Tensor:
    """Return the codes of pages, (32 P, rows) uint8 on the device of `bits`.

    Args:
        pages: (P, bytes) uint8.
        bits: (rows,) uint8.
        address: Where the pages belong.

    Raises:
        DataError: a page has another size, is damaged, or belongs elsewhere; the message says which.
    """
    check_pages(pages, page_bytes(bits), address)
    dimension, plane = _planes(bits)
    rows = len(bits)
    codes = torch.zeros((len(pages) * TOKENS, rows), dtype=torch.uint8, device=bits.device)
    shift = torch.arange(8, dtype=torch.uint8, device=bits.device).view(1, 1, 8, 1)
    for begin in range(0, len(pages), _TOGETHER):
        part = pages[begin : begin + _TOGETHER, HEADER:].to(bits.device)
        planes = part.view(len(part), -1, 4).transpose(1, 2)[:, :, None]  # (P, 4, 1, planes)
        tokens = ((planes >> shift) & 1).reshape(len(part) * TOKENS, -1) << plane
        codes[begin * TOKENS : begin * TOKENS + len(tokens)].index_add_(1, dimension, tokens)
    return codes


def check_pages(pages: Tensor, size: int, address: PageAddress) -> None:
    """Check sizes, checksums and headers of pages.

    Raises:
        DataError: see `unpack_pages`.
    """
    where = f"layer {address.layer}"
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != size:
        raise DataError(f"{where}: pages are {tuple(pages.shape)} {pages.dtype}, and have {size} bytes each")
    damaged, elsewhere = _first_wrong(pages.cpu().contiguous(), address)
    if damaged >= 0:
        raise DataError(f"{where}: page {address.first + damaged} is damaged: its checksum differs")
    if elsewhere >= 0:
        raise DataError(f"{where}: page {address.first + elsewhere} belongs to another text or place")


def _first_wrong(pages: Tensor, address: PageAddress) -> tuple[int, int]:
    """Return the first damaged page and the first that belongs elsewhere; -1 for none."""
    if native_for(torch.float32, pages.device) is not None:
        return native.check_pages(pages, address)
    content = pages.numpy()
    header = content[:, :HEADER].copy().view(_HEADER_TYPE)[:, 0]
    expected = np.arange(address.first, address.first + len(pages))
    right = (header["unit"] == address.unit) & (header["layer"] == address.layer)
    right &= (header["page"] == expected) & (header["count"] == TOKENS)
    return _first(header["crc"] != _checksums(content)), _first(~right)


def _first(mask: npt.NDArray[np.bool_]) -> int:
    return int(np.argmax(mask)) if mask.any() else -1


def _checksums(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    return crc32c(pages[:, HEADER:], crc32c(pages[:, : HEADER - 4]))


def _planes(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the dimension and the bit of every plane: (planes,) int64 and uint8."""
    counts = bits.long()
    dimension = torch.repeat_interleave(torch.arange(len(bits), device=bits.device), counts)
    first = counts.cumsum(0) - counts
    plane = torch.arange(len(dimension), device=bits.device) - first[dimension]
    return dimension, plane.to(torch.uint8)


def _weights(device: torch.device) -> Tensor:
    return (1 << torch.arange(8, dtype=torch.int64, device=device)).to(torch.uint8).view(1, 1, 8, 1)
