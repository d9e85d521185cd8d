"""Which number format a preset takes on a model: what its heads allow, and what large biases on keys leave right."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from millpond.codec import Codec, CodecSpec, codecs_of, resolve
from millpond.hf.model_profile import ModelProfile, named
from millpond.kernels.packed.layout import Format

#: What a bias must not exceed. Keys less their bias have deviations of 1 to 3 in the models that were read; biases were
#: 54 to 211 in Qwen2.5-Coder-0.5B, where `rotated4` moved predictions by .25 nats and int4 by .009.
LARGE = 8.0
#: What a preset stores in where its own format would lose: as many bits, with a scale for each channel.
BY_CHANNEL = "int4"
_NAMES = ("k_proj",)
_found: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


class KeyBiasWarning(UserWarning):
    """The number format that was chosen loses much on this model, whose keys have large biases."""


def largest_key_bias(model: Any) -> float:
    """The largest absolute bias of a key projection; 0 where there is none, or its weights are not in memory."""
    if model not in _found:
        biases = [module.bias for name, module in model.named_modules() if _is_key_projection(name, module)]
        _found[model] = max((float(bias.detach().abs().max()) for bias in biases), default=0.0)
    return _found[model]


def _is_key_projection(name: str, module: nn.Module) -> bool:
    bias = getattr(module, "bias", None)
    return name.rpartition(".")[2] in _NAMES and bias is not None and bias.device.type != "meta" and bias.numel() > 0


def loses_by_bias(codec: Codec) -> bool:
    """Whether keys have one scale for all channels of a token, of which a few large ones take it."""
    return any(
        tier.key.format is not Format.ROWS and not tier.key.per_channel and not tier.pre_rope for tier in codec.tiers
    )


def suited(codec: CodecSpec, model: Any) -> CodecSpec:
    """The format of a preset for a model: its own, or `BY_CHANNEL` where keys have large biases that it loses by."""
    large = _loses(str(codec)) and largest_key_bias(model) > LARGE
    return BY_CHANNEL if large else codec


def entry_dims(profile: ModelProfile) -> list[tuple[int, int]] | None:
    """Channels of a key and of a value in the layers, as the configuration says; None: it does not, or latents."""
    config = profile.config
    hidden = named(config, "hidden_size")
    key = named(config, "head_dim") or (hidden // profile.n_heads if hidden and profile.n_heads else None)
    if not isinstance(key, int) or profile.latent is not None:
        return None
    value = named(config, "v_head_dim") or key
    return [(key, int(value))]


@lru_cache(maxsize=64)
def _loses(codec: str) -> bool:
    return any(loses_by_bias(one) for one in codecs_of(resolve(codec)))


def warn_of_bias(codec: Codec, model: Any) -> None:
    """Say so where a format that `loses_by_bias` was chosen on a model that has large ones."""
    if (bias := largest_key_bias(model)) > LARGE:
        warnings.warn(
            f"codec {codec.name!r} has one scale for all channels of a key, and the keys of this model have biases of "
            f"up to {bias:.0f}: answers suffer much. Use int4 or int8, which have a scale for each channel",
            KeyBiasWarning,
            stacklevel=3,
        )
