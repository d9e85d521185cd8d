"""Names of the dtypes that weights are loaded in: our own, those of torch and vLLM, and torch's dtypes themselves."""

from __future__ import annotations

import torch

from millpond.codec import DTYPES
from millpond.errors import unknown

#: Other names of ours.
ALIASES = {"float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16"}


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """Return our name of a dtype: "f32", "f16", "bf16" or "auto"; None stays None.

    Raises:
        OptionError: no such dtype.

    Example:
        >>> dtype_name("bfloat16"), dtype_name(torch.float16), dtype_name("auto")
        ('bf16', 'f16', 'auto')
    """
    if dtype is None or dtype == "auto":
        return dtype
    name = str(dtype).removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in DTYPES:
        raise unknown("dtype", str(dtype), ["auto", *DTYPES, *ALIASES])
    return name
