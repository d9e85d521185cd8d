"""Folders with random weights in safetensors, written layer by layer, so that no second copy is in memory."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import empty_model, parameter_bytes
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
#: Bytes of disk and memory that stay free beside the weights.
SPARE_DISK, SPARE_MEMORY = 10**9, 6 * 10**9
#: Standard deviation of the matrices.
DEVIATION = 0.02


class WeightFolder:
    """The folder of one model at a time; it goes with the process, or for the next model."""

    def __init__(self) -> None:
        self._shape: object = None
        self._folder: Path | None = None
        atexit.register(self._remove)

    def of(self, shape: Callable[[bool], Any], tiny: bool, device: torch.device) -> Path:
        """The folder of a shape's model, written if another one or none is there.

        Raises:
            NoRoom: too little disk or memory for it; nothing was written.
        """
        if self._folder is None or self._shape is not shape:
            self._remove()
            config = shape(tiny)
            folder = Path(tempfile.mkdtemp(prefix="millpond-opt-"))
            self._shape, self._folder = shape, folder
            if (lacking := no_room(parameter_bytes(config), folder)) is not None:
                self._remove()
                raise NoRoom(lacking)
            write_random(config, folder, device)
        return self._folder

    def _remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


class NoRoom(Exception):
    """The disk or the memory does not hold a model; the message has the bytes."""


def no_room(n_bytes: int, folder: Path) -> str | None:
    """Why a folder and the host's memory do not hold so many bytes of weights; None where they do."""
    disk, memory = shutil.disk_usage(folder).free - SPARE_DISK, free_memory() - SPARE_MEMORY
    for place, free in (("disk", disk), ("memory of the host", memory)):
        if n_bytes > free:
            return f"{n_bytes / 1e9:.1f} GB of weights, and the {place} has {max(free, 0) / 1e9:.1f} GB for them"
    return None


def free_memory() -> int:
    """Bytes that the host can still give, of its memory and of the limit of this group of processes."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    assert found is not None, "Linux says so"
    free, group = int(found[1]) * 1024, Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(encoding="utf-8"), re.M)
    except (OSError, ValueError):  # no limit, or none that is told there
        return free
    return min(free, limit - used + (int(cached[1]) if cached else 0))


def write_random(config: Any, folder: Path, device: torch.device) -> None:
    """Write a model with random weights in bf16, one file for each layer; at most one layer is in memory."""
    model = empty_model(config)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, weight in model.named_parameters():  # shared ones once
        found = re.search(r"\.layers\.(\d+)\.", name)
        files.setdefault(f"layer-{int(found[1]):03}" if found else "ends", {})[name] = weight.shape
    generator = torch.Generator(device).manual_seed(0)
    for file, shapes in files.items():
        tensors = {name: drawn(name, shape, generator).cpu() for name, shape in shapes.items()}
        save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
    places = {name: f"{file}.safetensors" for file, shapes in files.items() for name in shapes}
    index = {"metadata": {"total_size": parameter_bytes(config)}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)


def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A weight as models begin with it: matrices are random, norms 1, biases 0."""
    if len(shape) > 1:
        weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
        return weight.normal_(0, DEVIATION, generator=generator)
    value = 0.0 if name.endswith("bias") else 1.0
    return torch.full(shape, value, dtype=torch.bfloat16, device=generator.device)
