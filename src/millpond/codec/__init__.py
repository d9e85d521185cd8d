"""Number formats of stored entries, by name.

Imports: errors, kernels.
"""

from __future__ import annotations

import torch

from millpond.codec.presets import PRESETS, codec_named
from millpond.codec.spec import Codec, is_plain
from millpond.errors import OptionError, unknown

__all__ = ["DTYPES", "Codec", "codec_named", "list_codecs", "resolve"]

#: Formats that store a number as it is.
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
#: How a name in one word joins the format of keys to that of values, as "bf16+int4".
JOINT = "+"


def list_codecs() -> list[str]:
    """The names of all number formats. "auto" stores what the model computes; "a+b" is keys as a and values as b."""
    return ["auto", *DTYPES, *(name for name in PRESETS if name not in DTYPES)]


def resolve(codec: str | tuple[str, str]) -> torch.dtype | Codec | None:
    """What a name, or a pair of names for keys and values, stands for: a dtype, a codec, or None for "auto".

    Raises:
        OptionError: no such codec, or a pair that cannot share a page.
    """
    names = tuple(codec.split(JOINT)) if isinstance(codec, str) else tuple(codec)
    if len(names) == 1:
        return _one(names[0])
    if len(names) != 2:
        raise OptionError(f"codec={codec!r} names {len(names)} formats; give one, or one for keys and one for values")
    for name in names:
        if name in ("auto", *DTYPES) and name not in PRESETS:
            raise OptionError(f"codec={codec!r}: {name!r} cannot be one of a pair; write 'bf16' for plain numbers")
        _one(name)
    found = codec_named((names[0], names[1]))
    return torch.bfloat16 if is_plain(found) and not found.prune else found


def _one(name: str) -> torch.dtype | Codec | None:
    if name == "auto":
        return None
    if name in DTYPES:
        return DTYPES[name]
    if name not in PRESETS:
        raise unknown("codec", name, list_codecs())
    return PRESETS[name]
