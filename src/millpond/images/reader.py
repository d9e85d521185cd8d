"""Reader of images: from a data: URL, a file's bytes or an image of Pillow to what a model takes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from millpond.errors import ImageError, OptionError
from millpond.images.data_url import read_data_url
from millpond.images.header import read_header
from millpond.images.limits import ImageLimits
from millpond.images.picture import Picture
from millpond.optional import require


class ImageReader:
    """Image processor of a model with limits; Pillow is imported when the first image is read.

    Args:
        processor: Image processor of transformers.
        token: Text of the token in whose place an image stands.
        n_tokens: Tokens of an image.
        limits: Limits of images.

    Attributes:
        token: See above.
        n_tokens: See above.
        limits: See above.
    """

    def __init__(self, processor: Any, token: str, n_tokens: int, limits: ImageLimits | None = None) -> None:
        self._processor = processor
        self.token, self.n_tokens, self.limits = token, n_tokens, limits or ImageLimits()

    def with_limits(self, limits: ImageLimits) -> ImageReader:
        """Return the same reader with other limits."""
        return ImageReader(self._processor, self.token, self.n_tokens, limits)

    def read_all(self, images: Sequence[Any]) -> tuple[Picture, ...]:
        """Return the pictures of a prompt, see `read`.

        Raises:
            ImageError: more than allowed, or see `read`.
        """
        self.limits.check_count(len(images))
        return tuple(map(self.read, images))

    def read(self, image: Any) -> Picture:
        """Return a picture.

        Args:
            image: A data: URL, the bytes of a PNG, JPEG, GIF or WebP file, an image of Pillow, or a picture already.

        Raises:
            ImageError: it is of another kind, beyond the limits, damaged, or not of the kind that its URL says.
            OptionError: Pillow is not installed.
        """
        if isinstance(image, Picture):
            return image
        if isinstance(image, str):
            kind, data = read_data_url(image, self.limits)
            return self._processed(self._decoded(data, kind))
        if isinstance(image, bytes | bytearray | memoryview):
            self.limits.check_bytes(len(image))
            return self._processed(self._decoded(bytes(image)))
        if not isinstance(image, _pillow().Image):
            raise ImageError(
                f"{type(image).__name__} is no image: give a data: URL, the bytes of a file, or an image of Pillow"
            )
        self.limits.check_size(*image.size)
        return self._processed(self._in_rgb(image))

    def expand(self, text: str, n_images: int) -> str:
        """Return a prompt's text with as many tokens in the place of each image as it has.

        Raises:
            ImageError: the text has places for more or fewer images.
        """
        places = text.count(self.token)
        if places != n_images:
            raise ImageError(
                f"the prompt has {n_images} images and {places} times {self.token!r}, which stands for one: leave it "
                "out of texts, and use a chat template that shows images"
            )
        return text.replace(self.token, self.token * self.n_tokens)

    def _decoded(self, data: bytes, kind: str | None = None) -> Any:
        """Return an image of Pillow in RGB from the bytes of a file.

        Its header is checked first.
        """
        header = read_header(data)
        if kind not in (None, header.kind):
            raise ImageError(f"the URL says {kind}, and the bytes are a {header.kind}; name the right type")
        self.limits.check_size(header.width, header.height)
        if header.scans > self.limits.scans:
            raise ImageError(f"a JPEG of {header.scans:,} scans: it may have {self.limits.scans}; save it again")
        pillow = _pillow()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Pillow, about files that are not as they should be
                image = pillow.open(BytesIO(data), formats=(header.kind,))
                if image.size == (header.width, header.height) and not getattr(image, "is_animated", False):
                    return self._in_rgb(image)
        except OptionError:
            raise
        except Exception as error:  # whatever decoders raise of what a stranger wrote
            raise ImageError(f"the {header.kind} cannot be decoded ({type(error).__name__}); it is damaged") from None
        raise ImageError(f"the {header.kind} has several frames, or another size than its header; send one image")

    def _in_rgb(self, image: Any) -> Any:
        """Return an image upright and in RGB, decoded."""
        try:
            return require("PIL.ImageOps", "vision", "an image").exif_transpose(image).convert("RGB")
        except OptionError:
            raise
        except Exception as error:  # see `_decoded`
            raise ImageError(f"the image cannot be decoded ({type(error).__name__}); it is damaged") from None

    def _processed(self, image: Any) -> Picture:
        try:
            pixels: Any = self._processor(images=[image], return_tensors="pt")["pixel_values"][0]
        except Exception as error:  # of classes of transformers, about sizes that they do not scale
            raise ImageError(f"the model's image processor refuses the image ({type(error).__name__})") from error
        if not isinstance(pixels, Tensor) or pixels.ndim != 3 or not bool(torch.isfinite(pixels).all()):
            raise ImageError("the model's image processor made no picture of the image; send another")
        return Picture(pixels)


def _pillow() -> Any:
    return require("PIL.Image", "vision", "an image")
