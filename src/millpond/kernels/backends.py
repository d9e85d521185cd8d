"""Available native kernels, and the inputs that they support."""

from __future__ import annotations

import os
from types import ModuleType

import torch

#: What the native kernels and those on a GPU read and write.
NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_native() -> ModuleType | None:
    """Return the native kernels, where they were built."""
    from millpond.kernels import native

    return native if native.is_available() else None


def native_for(dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """Return the native kernels where they serve this dtype and device; None elsewhere."""
    wanted = os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
    return load_native() if wanted and dtype in NATIVE_DTYPES and device.type == "cpu" else None
