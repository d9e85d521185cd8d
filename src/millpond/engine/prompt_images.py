"""Images of one prompt in the engine: their tokens, their embeddings, and ids under which prompts share them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.errors import ImageError, OptionError
from millpond.images.picture import Picture
from millpond.images.reader import ImageReader
from millpond.runner.image_encoder import ImageEncoder

#: Images that keep their number: of one that was forgotten nothing is shared with those that come later.
MAX_NUMBERS = 2**16


class ImageNumbers:
    """Numbers of images by their digests.

    Equal images have one, and no two others ever have the same.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = count(1)

    def of(self, picture: Picture) -> int:
        """Return the number of a picture, 1 or more."""
        number = self._numbers.pop(picture.digest, None)
        self._numbers[picture.digest] = number = next(self._next) if number is None else number
        if len(self._numbers) > MAX_NUMBERS:
            self._numbers.popitem(last=False)
        return number


class PromptImages:
    """Pictures of a prompt, one after another in the places of its image tokens.

    Args:
        pictures: The pictures.
        numbers: Their numbers, see `ImageNumbers`.
        columns: Indices of the image tokens in the prompt, ascending, (n,) int64.
        encoder: Image side of the model.
    """

    def __init__(
        self, pictures: Sequence[Picture], numbers: Sequence[int], columns: np.ndarray, encoder: ImageEncoder
    ) -> None:
        self._pictures, self._numbers, self._columns, self._encoder = pictures, numbers, columns, encoder
        self._features: dict[int, Tensor] = {}  # by index of the picture

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self._pictures)

    def share_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a prompt by which it is shared, (prompt,) int64.

        Tokens of an image are -1 less its number.

        So two prompts have the same ids up to a place exactly if they have the same tokens and images up to it.
        """
        shared = ids.copy()
        shared[self._columns] = -1 - np.repeat(np.array(self._numbers), self._encoder.n_tokens)[: len(self._columns)]
        return shared

    def first(self, n_tokens: int) -> PromptImages | None:
        """Return the images of the first tokens of the prompt; None: there are none."""
        columns = self._columns[self._columns < n_tokens]
        n = -(-len(columns) // self._encoder.n_tokens)
        return PromptImages(self._pictures[:n], self._numbers[:n], columns, self._encoder) if n else None

    def vectors(self, start: int, stop: int) -> tuple[np.ndarray, Tensor] | None:
        """Return the image tokens of a part of the prompt, and their embeddings.

        The part is from `start` to `stop`.

        Pictures are encoded when their first token is read, and kept up to their last.

        Returns:
            Indices of the tokens in the prompt, (m,) int64, and embeddings (m, width); None: there are none.
        """
        begin, end = np.searchsorted(self._columns, (start, stop)).tolist()
        if begin == end:
            return None
        size = self._encoder.n_tokens
        parts = []
        for index in range(begin // size, -(-end // size)):
            if index not in self._features:
                self._features[index] = self._encoder.encode(self._pictures[index])
            parts.append(self._features[index][max(begin - index * size, 0) : end - index * size])
        self._features = {index: vectors for index, vectors in self._features.items() if (index + 1) * size > end}
        return self._columns[begin:end], torch.cat(parts)


def images_of(
    ids: Sequence[int], pictures: Sequence[Picture], encoder: ImageEncoder | None, numbers: ImageNumbers
) -> PromptImages | None:
    """Return the images of a prompt; None: it has none.

    Args:
        ids: Tokens of the prompt.
        pictures: Its pictures, in their order.
        encoder: Image side of the model; None: it takes text alone.
        numbers: Numbers of the engine's images.

    Raises:
        ImageError: images for a model of text, pictures of another size than the model's, or other than as many image
            tokens as they have.
    """
    if encoder is None:
        if pictures:
            raise ImageError(f"{len(pictures)} images: this model takes text alone; leave them out")
        return None
    columns = np.flatnonzero(np.asarray(ids, dtype=np.int64) == encoder.token_id)
    if len(columns) != len(pictures) * encoder.n_tokens:
        raise ImageError(
            f"the prompt has {len(columns)} image tokens (id {encoder.token_id}) and {len(pictures)} images of "
            f"{encoder.n_tokens} tokens each; write that many image tokens for each image, and no others"
        )
    for picture in pictures:
        encoder.check(picture)
    return PromptImages(pictures, [numbers.of(picture) for picture in pictures], columns, encoder) if pictures else None


def image_reader(encoder: ImageEncoder | None, processor: Any, tokenizer: Any) -> ImageReader | None:
    """Return the reader of a model's images.

    None: the model takes none, or brings no processor or tokenizer.

    Args:
        encoder: Image side of the model; None for a model of text.
        processor: transformers' image processor of the model.
        tokenizer: Tokenizer of the model.

    Raises:
        OptionError: a processor for a model of text.
    """
    if encoder is None and processor is not None:
        raise OptionError("image_processor= belongs to a model that takes images; leave it out for a model of text")
    if encoder is None or processor is None or tokenizer is None:
        return None
    return ImageReader(processor, tokenizer.convert_ids_to_tokens(encoder.token_id), encoder.n_tokens)
