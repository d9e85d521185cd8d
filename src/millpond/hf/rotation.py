"""The rotary embedding of a transformers model, forwards and backwards."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.errors import UnsupportedModelError
from millpond.hf.support import rotary_of, text_config


class ModelRotation:
    """Rotates keys and queries with the model's own cosines, sines and layout (half, interleaved, partial)."""

    def __init__(self, rotary: nn.Module, apply: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._rotary = rotary
        self._apply = apply

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelRotation:
        """The rotation of a model.

        Raises:
            UnsupportedModelError: its positions are not a rotation of the keys that stays the same as text grows.
        """
        rotary = rotary_of(model)
        name = type(model).__name__
        if rotary is None:
            raise UnsupportedModelError(
                f"{name} has no rotary position embedding, so positions cannot be moved inside the cache; "
                'use positions="absolute"'
            )
        kind = str(getattr(rotary, "rope_type", "default"))
        if kind in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"{name} changes its rotary frequencies with the length of the text ({kind}), so cached keys cannot be "
                'moved; use positions="absolute"'
            )
        for module in model.modules():
            apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
            if type(module).__name__.endswith("Attention") and apply is not None:
                return cls(rotary, apply)
        raise UnsupportedModelError(
            f"{name} ({text_config(model).model_type}) does not show how it applies its rotary embedding; "
            'use positions="absolute"'
        )

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """x (B, H, n, D) rotated to positions (B, n), or back from them, in float32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = self._rotary(wide, positions)
        if inverse:
            # a scaled rotation (YaRN) has cos^2 + sin^2 = a^2: its inverse is the transpose over a^2
            norm = cos[..., :1] ** 2 + sin[..., :1] ** 2
            cos, sin = cos / norm, -sin / norm
        n = cos.shape[-1]
        head, rest = wide[..., :n], wide[..., n:]
        turned, _ = self._apply(head, head, cos, sin)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
