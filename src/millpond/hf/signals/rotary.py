"""The rotary embedding of a transformers model, forwards and backwards."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import UnsupportedModelError
from millpond.hf.model_support import FULL, rotary_of, stores_latents, text_config

Angles = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


#: Kinds of rotary embeddings whose frequencies change with the length of the text.
CHANGING = ("dynamic", "longrope")
#: Families whose layers rotate only where they have a sliding window, in a model that has such layers.
ROTATE_IN_WINDOWS = {"cohere2", "exaone4", "afmoe"}


class ModelRotation:
    """Rotates keys and queries with the model's own cosines, sines and layout (half, interleaved, partial)."""

    def __init__(self, rotary: nn.Module, apply: Apply, **kind: str) -> None:
        self._angles: Angles = partial(rotary, **kind)
        self._apply = apply
        self._per_angle = _numbers_per_angle(self._angles, apply, next(rotary.buffers()).device)

    @classmethod
    def of(cls, model: PreTrainedModel, layer_type: str = FULL) -> ModelRotation:
        """The rotation of a model; of its layers of one type, where these differ.

        Raises:
            UnsupportedModelError: its positions are not a rotation of the keys that stays the same as text grows.
        """
        rotary = rotary_of(model)
        name = type(model).__name__
        if stores_latents(text_config(model)):
            raise UnsupportedModelError(
                f"{name} caches latents (MLA), whose positions cannot be moved inside the cache; "
                'use positions="absolute"'
            )
        if rotary is None:
            raise UnsupportedModelError(
                f"{name} has no rotary position embedding, so positions cannot be moved inside the cache; "
                'use positions="absolute"'
            )
        kinds = getattr(rotary, "rope_type", "default")
        kind = _kind(rotary, layer_type)
        if kind in CHANGING:
            raise UnsupportedModelError(
                f"{name} changes its rotary frequencies with the length of the text ({kind}), so cached keys cannot be "
                'moved; use positions="absolute"'
            )
        if isinstance(kinds, dict) and layer_type not in kinds:
            raise UnsupportedModelError(
                f"{name} does not rotate its layers of type {layer_type}, so their positions cannot be moved inside "
                'the cache; use positions="absolute"'
            )
        by_layer = "layer_type" in inspect.signature(rotary.forward).parameters and isinstance(kinds, dict)
        for module in model.modules():
            apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
            if type(module).__name__.endswith("Attention") and apply is not None:
                return cls(rotary, _of_both(apply), **({"layer_type": layer_type} if by_layer else {}))
        raise UnsupportedModelError(
            f"{name} ({text_config(model).model_type}) does not show how it applies its rotary embedding; "
            'use positions="absolute"'
        )

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Return x (B, H, n, D) rotated to positions (B, n), or back from them, in float32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = self._angles(wide, positions)
        if inverse:
            # a scaled rotation (YaRN) has cos^2 + sin^2 = a^2: its inverse is the transpose over a^2
            norm = cos[..., :1] ** 2 + sin[..., :1] ** 2
            cos, sin = cos / norm, -sin / norm
        n = cos.shape[-1] * self._per_angle
        head, rest = wide[..., :n], wide[..., n:]
        turned, _ = self._apply(head, head[:, :1], cos, sin)  # the second one is turned as well
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def _of_both(apply: Callable[..., Any]) -> Apply:
    """How queries and keys are turned, in a model that turns one of them at a time too."""
    if list(inspect.signature(apply).parameters)[1] != "cos":
        return apply
    return lambda q, k, cos, sin: (apply(q, cos, sin), apply(k, cos, sin))


def _numbers_per_angle(angles: Angles, apply: Apply, device: torch.device) -> int:
    """1 where cosines come once per number of a head, 2 where they come once per rotated pair (gpt-oss)."""
    cos, sin = angles(torch.zeros(1, device=device), torch.zeros(1, 1, dtype=torch.long, device=device))
    x = torch.zeros(1, 1, 1, cos.shape[-1], device=device)
    try:
        return 1 if apply(x, x, cos, sin)[0].shape == x.shape else 2
    except RuntimeError:
        return 2


def _kind(rotary: nn.Module, layer_type: str) -> str:
    """The kind of a rotary embedding, for layers of one type."""
    kinds = getattr(rotary, "rope_type", "default")
    return str(kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds)


def attach_rotations(model: PreTrainedModel, cores: Sequence[LayerCache]) -> None:
    """Let scores see the queries of each layer as they were before RoPE, where the policy asks for it.

    Raises:
        UnsupportedModelError: the rotation of its queries cannot be undone.
    """
    if not any(core.policy.needs_unrotated_queries for core in cores):
        return
    config, name = text_config(model), type(model).__name__
    if stores_latents(config):
        raise UnsupportedModelError(
            f"{name} stores latents (MLA), one for all heads, so a score cannot compare its keys with queries; use a "
            "method that scores by attention (h2o, snapkv, tova) or by position (streaming, window)"
        )
    if rotary_of(model) is None:
        return
    try:
        rotations = layer_rotations(model, len(cores))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{error}; use a method that scores by attention (h2o, snapkv) or by keys alone (keydiff)"
        ) from None
    for core in cores:
        core.attention.rope = rotations[core.index]


def layer_rotations(model: PreTrainedModel, n_layers: int) -> list[ModelRotation | None]:
    """How each layer turns its queries and keys; None for one that does not.

    Raises:
        UnsupportedModelError: by more than the position in the text, so that it cannot be undone.
    """
    config, rotary = text_config(model), rotary_of(model)
    if rotary is None:
        return [None] * n_layers
    types = getattr(config, "layer_types", None) or [FULL] * n_layers
    if any(_kind(rotary, kind) in CHANGING for kind in types) or "mrope_section" in str(config.rope_parameters):
        raise UnsupportedModelError(
            f"{type(model).__name__} rotates a query or a key by more than its own position in the text "
            f"({config.rope_parameters}), which cannot be undone"
        )
    kinds = getattr(rotary, "rope_type", "default")
    rotations = {
        kind: None if isinstance(kinds, dict) and kind not in kinds else ModelRotation.of(model, kind)
        for kind in set(types)
    }
    unrotated = _unrotated_layers(model)
    return [None if index in unrotated else rotations[types[index]] for index in range(n_layers)]


def _unrotated_layers(model: PreTrainedModel) -> set[int]:
    """Layers whose queries and keys have no rotary position, in a model where others have."""
    config = text_config(model)
    types = getattr(config, "layer_types", None) or []
    windowed = config.model_type in ROTATE_IN_WINDOWS and getattr(config, "sliding_window", None)
    return {
        index
        for module in model.modules()
        if isinstance(index := getattr(module, "layer_idx", None), int)
        if not getattr(module, "use_rope", True) or (windowed and types[index] == FULL)
    }
