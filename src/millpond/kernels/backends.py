"""Which implementation of the op set serves which tensors: see `ops`."""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import blockwise, reference

#: What the native kernels and those on a GPU read and write.
NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_native() -> ModuleType | None:
    """The native kernels, where they were built."""
    from millpond.kernels import native

    return native if native.is_available() else None


def backend(pages_dtype: torch.dtype, device: torch.device) -> ModuleType:
    """The implementation that serves page ops for this dtype and device.

    Raises:
        OptionError: MILLPOND_KERNELS names an implementation that does not exist or cannot run here.
    """
    forced = os.environ.get("MILLPOND_KERNELS", "auto")
    if forced == "reference":
        return reference
    if forced == "gpu" or (forced == "auto" and device.type == "cuda"):
        from millpond.kernels import gpu

        return gpu if pages_dtype in NATIVE_DTYPES else reference
    if forced not in ("auto", "native"):
        raise OptionError(f"MILLPOND_KERNELS={forced!r}: use auto, reference, native or gpu")
    fits = pages_dtype in NATIVE_DTYPES and device.type == "cpu"
    if forced == "auto" and not fits:
        return reference
    native = load_native()
    if native is None and forced == "native":
        raise OptionError("MILLPOND_KERNELS=native, but this install has no native kernels; reinstall with a compiler")
    return native if native is not None and fits else reference


def native_for(dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """The native kernels where they serve this dtype and device; None elsewhere."""
    wanted = os.environ.get("MILLPOND_KERNELS", "auto") in ("auto", "native")
    return load_native() if wanted and dtype in NATIVE_DTYPES and device.type == "cpu" else None


def dense_backend(q: Tensor) -> ModuleType:
    """The implementation that serves `prefill` and `window_signal`, which see no pages.

    Where the page ops fall back to the reference (another dtype or device, no native kernels), these run in blocks
    of torch operations, unless the reference is asked for by name.
    """
    impl = backend(q.dtype, q.device)
    falls_back = impl is reference and os.environ.get("MILLPOND_KERNELS", "auto") != "reference"
    return blockwise if falls_back else impl
