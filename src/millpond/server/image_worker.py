"""Images of chats, read away from the event loop in a thread of their own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from millpond.images.data_url import check_data_url
from millpond.images.limits import ImageLimits
from millpond.images.picture import Picture
from millpond.images.reader import ImageReader
from millpond.server.client_pacing import in_thread
from millpond.server.errors import ApiError
from millpond.server.messages import Message


class ImageWorker:
    """Reader of the images of chats, one after another, so that texts wait for none of them.

    Args:
        reader: The engine's reader; None: the model takes text alone.
        limits: Limits of images.

    Attributes:
        reader: The reader with these limits.
    """

    def __init__(self, reader: ImageReader | None, limits: ImageLimits) -> None:
        self.reader = None if reader is None else reader.with_limits(limits)
        self._thread = ThreadPoolExecutor(1, "images")

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check(self, messages: Sequence[Message]) -> list[str]:
        """Return the URLs of the images of a chat; nothing is decoded.

        Raises:
            ApiError: images for a model of text.
            ImageError: too many, too long, or no data: URLs.
        """
        urls = [url for message in messages for url in message.image_urls]
        if urls and self.reader is None:
            message = "this model takes text alone, or the server has no image processor for it; leave images out"
            raise ApiError(400, message, "images_unsupported", "messages")
        if self.reader is not None:
            self.reader.limits.check_count(len(urls))
            for url in urls:
                check_data_url(url, self.reader.limits)
        return urls

    async def read(self, urls: Sequence[str]) -> tuple[Picture, ...]:
        """Return the pictures of checked URLs.

        Raises:
            ImageError: see `ImageReader.read`.
        """
        if not urls or self.reader is None:
            return ()
        return await in_thread(self._thread, self.reader.read_all, urls)
