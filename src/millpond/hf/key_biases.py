"""Key projections with large biases: scales for formats that can use them, a warning for those that cannot."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from millpond.codec import Codec, Format, LayerCodecs
from millpond.codec.basis import LEVEL, KeyScales, scales_for
from millpond.errors import UnsupportedModelError
from millpond.hf.model_profile import ModelProfile, entry_dims
from millpond.hf.signals.rotary import ModelRotation, layer_rotations
from millpond.kernels.packed.regions import pairs_of

_PROJECTION = "k_proj"
_scales_by_model: WeakKeyDictionary[Any, KeyScales | None] = WeakKeyDictionary()


class KeyBiasWarning(UserWarning):
    """Warning: the number format loses much on this model, whose keys have large biases."""


def key_biases(model: nn.Module) -> list[Tensor | None]:
    """Return the bias of each key projection by layer; None for one without, or not in memory."""
    biases = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == _PROJECTION:
            bias = getattr(module, "bias", None)
            biases.append(bias.detach() if isinstance(bias, Tensor) and bias.numel() and not bias.is_meta else None)
    return biases


def largest_key_bias(model: nn.Module) -> float:
    """Return the largest absolute bias of a key projection; 0 if there is none.

    Weights that are not in memory count as none.
    """
    return max((float(bias.abs().max()) for bias in key_biases(model) if bias is not None), default=0.0)


def loses_by_bias(codec: Codec) -> bool:
    """Whether keys have one scale per token, which a few channels with large values determine."""
    return any(
        tier.key.format.grouped and not (tier.key.per_channel or tier.key.less_mean or tier.pre_rope)
        for tier in codec.tiers
    )


def warn_of_bias(codec: Codec, model: nn.Module) -> None:
    """Warn if a format that `loses_by_bias` was chosen on a model with large key biases.

    Keys less their bias have deviations of 1 to 3 in the models that were read; biases were 54 to 211 in
    Qwen2.5-Coder-0.5B, where `rotated4_paper` moved predictions by .25 nats and int4 by .009.
    """
    if (bias := largest_key_bias(model)) > LEVEL:
        warnings.warn(
            f"codec {codec.name!r} has one scale for all channels of a key, and the keys of this model have biases of "
            f"up to {bias:.0f}: answers suffer much. Use rotated4, int4 or int8, which make up for them",
            KeyBiasWarning,
            stacklevel=3,
        )


def with_key_scales(stored: LayerCodecs | Format, profile: ModelProfile, model: nn.Module) -> LayerCodecs | Format:
    """Return the storage formats with the scales of this model's keys, if codecs take some."""

    def scaled(storage: Format) -> Format:
        if not isinstance(storage, Codec) or storage.ages or not storage.key.less_mean:
            return storage
        if model not in _scales_by_model:
            _scales_by_model[model] = _scales_of(profile, model)
        return replace(storage, key_scales=_scales_by_model[model])

    return stored.map(scaled) if isinstance(stored, LayerCodecs) else scaled(stored)


def _scales_of(profile: ModelProfile, model: nn.Module) -> KeyScales | None:
    biases, dims = key_biases(model), entry_dims(profile)
    if dims is None or len(biases) != profile.n_layers or all(bias is None for bias in biases):
        return None
    (key_dim, _), *_ = dims
    rotations: list[ModelRotation | None] = [None] * profile.n_layers
    with suppress(UnsupportedModelError):  # keys that turn by more than their position have scales by channel
        rotations = layer_rotations(profile)
    layers: list[Tensor | None] = []
    for bias, rotary in zip(biases, rotations, strict=True):
        if bias is None or bias.numel() % key_dim:
            layers.append(None)
            continue
        partner = None if rotary is None else _partners(rotary, key_dim, bias.device)
        layers.append(scales_for(bias.cpu().view(-1, key_dim), partner))
    return None if all(scales is None for scales in layers) else KeyScales(tuple(layers))


def _partners(rotary: ModelRotation, dim: int, device: torch.device) -> Tensor:
    """Return the channel that each channel rotates with, (dim,), -1 for none."""
    pairs = pairs_of(rotary.rotate, dim, device).long().cpu()
    partners = torch.full((dim,), -1)
    partners[pairs[:, 0]], partners[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    return partners
