"""Images in data: URLs, the only ones that are read: nothing is fetched for a client."""

from __future__ import annotations

import base64
import binascii
import re

from millpond.errors import ImageError
from millpond.images.limits import ImageLimits

#: Kinds of images by their media types, as Pillow names them.
KINDS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/gif": "GIF", "image/webp": "WEBP"}
#: Characters of a URL that are looked at for its beginning.
_HEAD = 128
_BEGINNING = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,", re.IGNORECASE)


def check_data_url(url: str, limits: ImageLimits) -> tuple[str, int]:
    """Check the beginning and the length of a URL.

    Args:
        url: The URL.
        limits: Limits of images.

    Returns:
        The kind of image that it names, and the place where its base64 begins.

    Raises:
        ImageError: no data: URL of a PNG, JPEG, GIF or WebP image in base64, or more bytes than allowed.
    """
    found = _BEGINNING.match(url[:_HEAD])
    if found is None:
        raise ImageError(
            f"image_url {url[:40]!r}: images are read from data: URLs in base64 alone, and nothing is fetched; send "
            "data:image/png;base64,... with the file itself"
        )
    kind = KINDS.get(found[1].lower())
    if kind is None:
        raise ImageError(f"an image of type {found[1][:40]!r}: it must be one of {', '.join(KINDS)}")
    limits.check_bytes((len(url) - found.end()) * 3 // 4 - 2)
    return kind, found.end()


def read_data_url(url: str, limits: ImageLimits) -> tuple[str, bytes]:
    """Return the kind of image that a data: URL names, and the bytes of its file.

    Raises:
        ImageError: see `check_data_url`; or broken base64.
    """
    kind, begin = check_data_url(url, limits)
    try:
        data = base64.b64decode(url[begin:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the base64 of an image is broken ({error}); encode the file again") from None
    limits.check_bytes(len(data))
    return kind, data
