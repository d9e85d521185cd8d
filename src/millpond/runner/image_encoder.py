"""Image side of a model: embeddings that stand in a prompt for the tokens of an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import ImageError, UnsupportedModelError
from millpond.hf.grad_mode import no_autograd
from millpond.hf.model_profile import ModelProfile
from millpond.images.picture import Picture

#: Model types that put the features of an image in the place of as many image tokens, in a text that is read as any.
FAMILIES = frozenset({"llava"})


def check_images(profile: ModelProfile, weights: str | None) -> None:
    """Check that packed rows can carry what a model reads besides text.

    Raises:
        UnsupportedModelError: images of another family than `FAMILIES`; or the matrices become codes, those of the
            image side too.
    """
    other = profile.takes_images and profile.outer_type not in FAMILIES
    if "mrope_section" in str(getattr(profile.config, "rope_parameters", None)) or other:
        raise UnsupportedModelError(
            f"{profile.name} takes images besides text in a way that the engine does not carry (it does for "
            f"{', '.join(sorted(FAMILIES))}); use compress(model, ...).generate"
        )
    if profile.takes_images and weights is not None:
        raise UnsupportedModelError(f"weights={weights!r} is for models of text alone; leave it out for {profile.name}")


class ImageEncoder:
    """Encoder of pictures of one size.

    Args:
        model: The whole model.
        profile: Its profile.

    Attributes:
        token_id: Id of the tokens of images.
        n_tokens: Tokens of an image.
        shape: (channels, height, width) of a picture.

    Raises:
        UnsupportedModelError: its pictures have no fixed size or number of tokens, or it names no token for them.
    """

    def __init__(self, model: PreTrainedModel, profile: ModelProfile) -> None:
        self._model: Any = model
        config: Any = model.config
        vision, ids = getattr(config, "vision_config", None), sorted(profile.image_ids)
        side = getattr(vision, "image_size", None)
        if len(ids) != 1 or not isinstance(side, int) or getattr(vision, "model_type", "") == "pixtral":
            raise UnsupportedModelError(
                f"{profile.name}: the engine carries images of one size, each in the place of one kind of token, and "
                "this model has others; use compress(model, ...).generate"
            )
        self.token_id = ids[0]
        self.shape = (int(getattr(vision, "num_channels", 3)), side, side)
        self.n_tokens = len(self._features(torch.zeros(self.shape)))

    def check(self, picture: Picture) -> None:
        """Check the shape of a picture.

        Raises:
            ImageError: it is of another image processor than this model's.
        """
        if tuple(picture.pixels.shape) != self.shape:
            raise ImageError(
                f"a picture of shape {tuple(picture.pixels.shape)}, and this model's have {self.shape}; read images "
                "with the model's own image processor"
            )

    def encode(self, picture: Picture) -> Tensor:
        """Return the embeddings (n_tokens, width) of a picture.

        Each is encoded alone, so its bits are its own.
        """
        return self._features(picture.pixels)

    @no_autograd
    def _features(self, pixels: Tensor) -> Tensor:
        batch = pixels[None].to(self._model.device, self._model.dtype)
        features: Tensor = self._model.get_image_features(pixel_values=batch, return_dict=True).pooler_output[0]
        return features
