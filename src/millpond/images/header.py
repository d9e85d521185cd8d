"""Kind and size of an image by the first bytes of its file, without a decoder."""

from __future__ import annotations

import struct
from typing import NamedTuple

from millpond.errors import ImageError

_PNG = b"\x89PNG\r\n\x1a\n"
#: Markers of a JPEG that begin a frame, and so tell its size; and those that stand alone.
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_SCAN = b"\xff\xda"


class Header(NamedTuple):
    """Kind and size that a file says it has.

    Attributes:
        kind: "PNG", "JPEG", "GIF" or "WEBP".
        width: Pixels of a row.
        height: Rows.
        scans: Scans of a JPEG, about; 1 for others.
    """

    kind: str
    width: int
    height: int
    scans: int = 1


def read_header(data: bytes) -> Header:
    """Return what the file `data` says of itself.

    Raises:
        ImageError: it is of no kind that is read here, or ends before it tells its size.

    Example:
        >>> read_header(b"GIF89a" + bytes([3, 0, 2, 0]))
        Header(kind='GIF', width=3, height=2, scans=1)
    """
    try:
        if data.startswith(_PNG):
            return Header("PNG", *_png(data))
        if data.startswith(b"\xff\xd8\xff"):
            return Header("JPEG", *_jpeg(data), data.count(_SCAN))
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return Header("GIF", *struct.unpack_from("<HH", data, 6))
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return Header("WEBP", *_webp(data))
    except (struct.error, IndexError):
        raise ImageError("the image ends inside its header; send the whole file") from None
    raise ImageError("the bytes are no PNG, JPEG, GIF or WebP image; send one of these")


def _png(data: bytes) -> tuple[int, int]:
    length, name, width, height = struct.unpack_from(">I4sII", data, 8)
    if name != b"IHDR" or length != 13:
        raise ImageError("the PNG does not begin with its size (IHDR); the file is damaged")
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    place = 2
    while True:
        if data[place] != 0xFF:
            raise ImageError("the JPEG has other bytes where a marker must be; the file is damaged")
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
        elif marker in _ALONE:
            place += 2
        elif marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, place + 5)
            return width, height
        elif marker in (0xD9, 0xDA):
            raise ImageError("the JPEG has no frame that tells its size; the file is damaged")
        else:
            (length,) = struct.unpack_from(">H", data, place + 2)
            if length < 2:
                raise ImageError("a part of the JPEG is shorter than its own length; the file is damaged")
            place += 2 + length


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return _three(data, 24) + 1, _three(data, 27) + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ImageError("the WebP does not begin with an image; the file is damaged")


def _three(data: bytes, place: int) -> int:
    """Return the number in three bytes, the lowest first."""
    low, high = struct.unpack_from("<HB", data, place)
    return int(low) | int(high) << 16
