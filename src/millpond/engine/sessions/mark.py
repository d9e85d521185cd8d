"""Mark of a model for what outlives the process: all of its weights, its adapters and its configuration."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from millpond.hf.model_support import unwrapped
from millpond.kernels.checksum import crc32

#: Entries of a configuration that do not change what a model computes.
_IGNORED = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}


def session_mark(model: Any, weights: str | None) -> str:
    """Equal for models that compute the same: made before `weights` are packed.

    Unlike `fingerprint` it reads every number, so that two adapters of one name differ wherever they differ. That takes
    about a second per 2 GB.
    """
    model = unwrapped(model)
    digest = hashlib.sha256(f"{type(model).__name__} {model.dtype} {weights} {_adapters(model)}".encode())
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    settings: dict[str, Any] = to_dict()
    kept = {name: value for name, value in settings.items() if name not in _IGNORED}
    digest.update(json.dumps(kept, sort_keys=True, default=lambda value: type(value).__name__).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda one: one[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)} ".encode())
    return digest.hexdigest()


def _checksum(tensor: torch.Tensor) -> int:
    if tensor.is_meta:
        return 0
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return crc32(flat)


def _adapters(model: Any) -> str:
    """Which adapters of its layers act, in which strength: their weights alone do not say it."""
    found = []
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list | tuple) and hasattr(module, "scaling"):
            scaling, off = module.scaling, getattr(module, "disable_adapters", False)
            merged = getattr(module, "merged_adapters", [])
            found.append(f"{name} {[(one, scaling.get(one)) for one in active]} {merged} {off}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
