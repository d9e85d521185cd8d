"""How an entry is stored: number formats by name."""

from __future__ import annotations

import torch

from millpond.codec.presets import preset
from millpond.codec.spec import Codec
from millpond.errors import unknown

__all__ = ["DTYPES", "Codec", "codecs", "preset", "storage_dtype"]

#: Formats that store a number as it is.
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def codecs() -> list[str]:
    """The names of all number formats. "auto" stores what the model computes."""
    return ["auto", *DTYPES]


def storage_dtype(codec: str) -> torch.dtype | None:
    """The dtype of a codec, None for "auto".

    Raises:
        OptionError: no such codec.
    """
    if codec == "auto":
        return None
    if codec not in DTYPES:
        raise unknown("codec", codec, codecs())
    return DTYPES[codec]
