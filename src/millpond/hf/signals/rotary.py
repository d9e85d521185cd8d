"""Rotary embedding of a transformers model, forwards and backwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import UnsupportedModelError
from millpond.hf.model_profile import FULL, ModelProfile
from millpond.kernels import decoder_ops

Angles = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


#: Kinds of rotary embeddings whose frequencies change with the length of the text.
CHANGING = ("dynamic", "longrope")
#: Positions of a model whose configuration names no limit.
UNKNOWN_REACH = 8192


#: Positions at most whose cosines a rotation caches: those of all layers of a stored text, in a few megabytes.
MAX_CACHED = 8192


class _Angles(NamedTuple):
    """Cosines and sines of some positions (B, n)."""

    positions: Tensor
    inverse: bool
    cos: Tensor
    sin: Tensor


class ModelRotation:
    """Rotation of keys and queries with the model's cosines, sines and layout.

    The layout is half, interleaved or partial.

    Args:
        rotary: Module that computes cosines and sines.
        apply: Function that rotates queries and keys.
        reach: Positions that the model was trained on; None if its configuration names no limit.
        **kind: Keyword arguments of `rotary`, such as the type of the layer.

    Attributes:
        reach: Positions that the model was trained on.
    """

    def __init__(self, rotary: nn.Module, apply: Apply, reach: int | None = None, **kind: str) -> None:
        self.reach = reach or UNKNOWN_REACH
        self._angles: Angles = partial(rotary, **kind)
        self._apply = apply
        device = next(rotary.buffers()).device
        self._per_angle = _numbers_per_angle(self._angles, apply, device)
        self._last: _Angles | None = None
        self._halves = self._per_angle == 1 and _turns_halves(self._angles, apply, device)

    @classmethod
    def of(cls, profile: ModelProfile, layer_type: str = FULL) -> ModelRotation:
        """Return the rotation of a model; of its layers of one type, if these differ.

        Raises:
            UnsupportedModelError: its positions are not a rotation of the keys that stays the same as text grows.
        """
        rotary, name = profile.rotary, profile.name
        if profile.latent is not None:
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
        if profile.apply_rotary is None:
            raise UnsupportedModelError(
                f"{name} ({profile.config.model_type}) does not show how it applies its rotary embedding; "
                'use positions="absolute"'
            )
        reach = profile.position_limit
        return cls(rotary, _of_both(profile.apply_rotary), reach, **({"layer_type": layer_type} if by_layer else {}))

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Return x (B, H, n, D) rotated to or back from positions (B, n), in float32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self._halves and not torch.is_grad_enabled() and decoder_ops.serves(wide):
            return _in_place(wide.clone() if wide is x else wide, *self._cached_turns(wide, positions, inverse))
        cos, sin = self._turns(wide, positions, inverse)
        n = cos.shape[-1] * self._per_angle
        head, unrotated = wide[..., :n], wide[..., n:]
        turned, _ = self._apply(head, head[:, :1], cos, sin)  # the second one is turned as well
        return torch.cat([turned, unrotated], -1) if unrotated.shape[-1] else turned

    def _turns(self, wide: Tensor, positions: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (1 or B, n, dim) of positions (B, n), in the type of `wide`."""
        cos, sin = self._angles(wide, positions)
        if not inverse:
            return cos, sin
        # a scaled rotation (YaRN) has cos^2 + sin^2 = a^2: its inverse is the transpose over a^2
        norm = cos[..., :1] ** 2 + sin[..., :1] ** 2
        return cos / norm, -sin / norm

    def _cached_turns(self, wide: Tensor, positions: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """Return `_turns`, computed once for layers of a pass with the same positions."""
        last = self._last
        same = last is not None and (last.inverse, last.cos.dtype) == (inverse, wide.dtype)
        if last is not None and same and torch.equal(last.positions, positions):
            return last.cos, last.sin
        cos, sin = self._turns(wide, positions, inverse)
        if positions.numel() <= MAX_CACHED:
            self._last = _Angles(positions.clone(), inverse, cos, sin)
        return cos, sin


def _of_both(apply: Callable[..., Any]) -> Apply:
    """Return a function that rotates queries and keys, whether `apply` takes both or one."""
    if list(inspect.signature(apply).parameters)[1] != "cos":
        return apply
    return lambda q, k, cos, sin: (apply(q, cos, sin), apply(k, cos, sin))


def _numbers_per_angle(angles: Angles, apply: Apply, device: torch.device) -> int:
    """Return 1 if cosines come once per number of a head, 2 if per rotated pair (gpt-oss)."""
    cos, sin = angles(torch.zeros(1, device=device), torch.zeros(1, 1, dtype=torch.long, device=device))
    x = torch.zeros(1, 1, 1, cos.shape[-1], device=device)
    try:
        return 1 if apply(x, x, cos, sin)[0].shape == x.shape else 2
    except RuntimeError:
        return 2


def _turns_halves(angles: Angles, apply: Apply, device: torch.device) -> bool:
    """Whether number i of a head rotates with number i + dim / 2, as in `DecoderOps.rotate_`."""
    cos, sin = angles(torch.zeros(1, device=device), torch.full((1, 1), 3, device=device))
    x = torch.linspace(-1, 1, cos.shape[-1], device=device).view(1, 1, 1, -1)
    turned = x.transpose(1, 2).clone()
    decoder_ops.DecoderOps().rotate_(turned[0], turned[0, :, :0], cos[0], sin[0])
    return torch.allclose(apply(x, x, cos, sin)[0], turned.transpose(1, 2), atol=1e-6)


def _in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, n, D) float32 by cos and sin (1 or B, n, dim) in place; return it."""
    turn = decoder_ops.choose(x[0, 0]).rotate_
    if x.shape[2] == 1:  # a decoding step: all sequences at once
        heads, n = x[:, :, 0], len(x)
        turn(heads, heads[:, :0], cos[:, 0].expand(n, -1), sin[:, 0].expand(n, -1))
        return x
    for sequence, row in enumerate(x):
        row_index, heads = min(sequence, len(cos) - 1), row.transpose(0, 1)
        turn(heads, heads[:, :0], cos[row_index], sin[row_index])
    return x


def _kind(rotary: nn.Module, layer_type: str) -> str:
    """Return the kind of a rotary embedding, for layers of one type."""
    kinds = getattr(rotary, "rope_type", "default")
    return str(kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds)


def attach_rotations(profile: ModelProfile, layer_caches: Sequence[LayerCache]) -> None:
    """Attach the inverse rotation to each layer, if the policy needs queries before RoPE.

    Raises:
        UnsupportedModelError: the rotation of its queries cannot be undone.
    """
    if not any(layer_cache.policy.needs_rotation for layer_cache in layer_caches):
        return
    if profile.latent is not None:
        raise UnsupportedModelError(
            f"{profile.name} stores latents (MLA), one for all heads, so a score cannot compare its keys with queries; "
            "use a method that scores by attention (h2o, snapkv, tova) or by position (streaming, window)"
        )
    if profile.rotary is None:
        return
    try:
        rotations = layer_rotations(profile)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{error}; use a method that scores by attention (h2o, snapkv) or by keys alone (keydiff)"
        ) from None
    for layer_cache in layer_caches:
        layer_cache.attention.rotary = rotations[layer_cache.index]


def changes_with_length(profile: ModelProfile) -> bool:
    """Whether the model rotates a token otherwise if the text is longer."""
    rotary = profile.rotary
    return rotary is not None and any(_kind(rotary, kind) in CHANGING for kind in profile.layer_types)


def rolling_rotations(profile: ModelProfile) -> list[ModelRotation | None]:
    """Return the rotation of each layer's keys if positions move in the cache; None for none.

    Raises:
        UnsupportedModelError: positions of its keys cannot change; the message says why.
    """
    try:
        ModelRotation.of(profile, profile.layer_types[0])
        return layer_rotations(profile)
    except UnsupportedModelError as error:
        reason = str(error).partition("; use positions=")[0]
        raise UnsupportedModelError(f"overflow='rolling': {reason}; leave overflow='refuse'") from None


def layer_rotations(profile: ModelProfile) -> list[ModelRotation | None]:
    """Return the rotation of each layer's queries and keys; None for a layer without.

    Raises:
        UnsupportedModelError: by more than the position in the text, so that it cannot be undone.
    """
    config, rotary, types = profile.config, profile.rotary, profile.layer_types
    if rotary is None:
        return [None] * profile.n_layers
    if changes_with_length(profile) or "mrope_section" in str(config.rope_parameters):
        raise UnsupportedModelError(
            f"{profile.name} rotates a query or a key by more than its own position in the text "
            f"({config.rope_parameters}), which cannot be undone"
        )
    kinds = getattr(rotary, "rope_type", "default")
    rotations = {
        kind: None if isinstance(kinds, dict) and kind not in kinds else ModelRotation.of(profile, kind)
        for kind in set(types)
    }
    return [None if i in profile.unrotated else rotations[types[i]] for i in range(profile.n_layers)]
