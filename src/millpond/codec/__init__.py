"""Number formats of stored entries, by name."""

from __future__ import annotations

import torch

from millpond.codec.by_age import SIZE, parse_ages
from millpond.codec.by_layer import JOINT, CodecSpec, Format, LayerCodecs, codec_text, codecs_of, parse_layers
from millpond.codec.presets import PRESETS, codec_named, has_ratio
from millpond.codec.spec import Codec, before_rope, is_plain
from millpond.errors import OptionError, unknown

#: Formats that store a number as it is.
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def list_codecs() -> list[str]:
    """Return the names of all number formats.

    "auto" stores what the model computes; "a+b" stores keys as a and values as b; "think:0.5" drops half of the key
    channels.
    """
    return ["auto", *DTYPES, *(name for name in PRESETS if name not in DTYPES)]


def resolve(codec: CodecSpec) -> LayerCodecs | Format:
    """Return the number format that a name stands for.

    It is a dtype, a codec, None for "auto", or one of these for each layer.

    Args:
        codec: A name, a pair of names for keys and values, formats by age, or names by layer, see `CodecSpec`.

    Raises:
        OptionError: no such codec, a pair that cannot share a page, tiers out of order, or layers that overlap.
    """
    codec = codec_text(codec)
    if isinstance(codec, str) and "=" in codec:
        return parse_layers(codec, _resolve_all)
    return _resolve_all(codec)


def _resolve_all(codec: str | tuple[str, str]) -> Format:
    """Return the format of every layer."""
    if isinstance(codec, str) and SIZE in codec:
        several = "," in codec or ";" in codec
        if several or not any(has_ratio(part) for part in codec.split(JOINT)):
            return parse_ages(codec)
    names = tuple(codec.split(JOINT)) if isinstance(codec, str) else tuple(codec)
    if len(names) == 1:
        return _one(names[0])
    if len(names) != 2:
        raise OptionError(f"codec={codec!r} names {len(names)} formats; give one, or one for keys and one for values")
    for name in names:
        if name in ("auto", *DTYPES) and name not in PRESETS:
            raise OptionError(f"codec={codec!r}: {name!r} cannot be one of a pair; write 'bf16' for plain numbers")
        _one(name)
    pair = codec_named((names[0], names[1]))
    return torch.bfloat16 if is_plain(pair) and not (pair.prune or pair.prune_values) else pair


def _one(name: str) -> Format:
    if name == "auto":
        return None
    if name in DTYPES:
        return DTYPES[name]
    if name not in PRESETS and not has_ratio(name):
        raise unknown("codec", name, list_codecs())
    return codec_named(name)
