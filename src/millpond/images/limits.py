"""Limits of images, checked before any of them is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.errors import ImageError

#: Images of a prompt, bytes of a file, and pixels of an image, at most.
MAX_IMAGES, MAX_IMAGE_BYTES, MAX_PIXELS = 8, 8 * 2**20, 2**24


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of the images of one prompt.

    Attributes:
        count: Images of a prompt, at most.
        n_bytes: Bytes of a file, at most.
        pixels: Width times height, at most.
        ratio: Longer side by the shorter one, at most: processors scale the shorter side, so that a thin image would
            become huge.
        scans: Scans of a JPEG, at most: each is decoded over all pixels, and may take a few bytes.
    """

    count: int = MAX_IMAGES
    n_bytes: int = MAX_IMAGE_BYTES
    pixels: int = MAX_PIXELS
    ratio: int = 20
    scans: int = 64

    def check_count(self, n: int) -> None:
        """Check the number of images of a prompt.

        Raises:
            ImageError: more than `count`.
        """
        if n > self.count:
            raise ImageError(f"{n} images: a prompt may have {self.count}; leave some out")

    def check_bytes(self, n: int) -> None:
        """Check the bytes of a file.

        Raises:
            ImageError: more than `n_bytes`.
        """
        if n > self.n_bytes:
            raise ImageError(f"an image of {n:,} bytes: it may have {self.n_bytes:,}; scale or compress it")

    def check_size(self, width: int, height: int) -> None:
        """Check width and height, as the file's header says.

        Raises:
            ImageError: no pixels, more than `pixels`, or a side far longer than the other.
        """
        if width < 1 or height < 1:
            raise ImageError(f"an image of {width} x {height} pixels: it must have at least one")
        if width * height > self.pixels:
            raise ImageError(
                f"an image of {width} x {height} = {width * height:,} pixels: it may have {self.pixels:,}; scale it"
            )
        if max(width, height) > self.ratio * min(width, height):
            raise ImageError(
                f"an image of {width} x {height} pixels: one side may be {self.ratio} times the other; cut it"
            )
