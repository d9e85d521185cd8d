"""Native kernels that are available, and the inputs that they support."""

from __future__ import annotations

import os
from types import ModuleType

import torch

#: What the native kernels and those on a GPU read and write.
NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_native() -> ModuleType | None:
    """Return the native kernels, if they were built."""
    from millpond.kernels import native

    return native if native.is_available() else None


def native_for(dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """Return the native kernels if they serve this dtype and device, else None."""
    is_wanted = os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
    return load_native() if is_wanted and dtype in NATIVE_DTYPES and device.type == "cpu" else None


def gpu_for(dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """Return the kernels in Triton if they serve this dtype and device, else None.

    Raises:
        OptionError: Triton is not installed.
    """
    wanted = os.environ.get("MILLPOND_KERNELS", "auto")
    if dtype not in NATIVE_DTYPES or not (wanted == "gpu" or (wanted == "auto" and device.type == "cuda")):
        return None
    from millpond.kernels import gpu

    return gpu
